"""Trains a tiny Llama under one strategy after another, saving or resuming: `torchrun worker.py SPEC.json`.

A spec is a list of runs. Each says strategy, variant, the checkpoints' folder, where to write its results, the steps to
train before and after the save (or the checkpoint to continue from). Runs share processes, as starting them costs most.
"""

import gc
import hashlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import Adafactor

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.load import find_checkpoint, resume_checkpoint
from finetune.checkpoint.sharding.access import build_access
from finetune.checkpoint.sharding.gather import gather_weights
from finetune.checkpoint.write.saver import Saver
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.errors import CheckpointError
from finetune.runtime import distributed
from finetune.runtime.parameters import AVERAGE
from finetune.runtime.progress import Progress
from finetune.strategy.upstream import (
    drop_not_yet_unfrozen_from_zero_norm,
    gloo_bridge,
    keep_bf16_parameters,
    warm_up_ddp_buckets,
)
from finetune.train.evaluate import AveragedWeights
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.scenarios.trained import forget

ROWS, LENGTH, VOCABULARY = 8, 12, 67  # 67: rows that no number of ranks divides
LOW_BIT = {
    "int8": OptimizerSection(state_dtype="int8", weight_decay=0.1),
    "chance": OptimizerSection(state_dtype="bfloat16", stochastic_rounding=True),  # bfloat16 weights
}


def main(spec_path: str) -> None:
    for spec in json.loads(Path(spec_path).read_text()):
        run(spec)
    distributed.barrier()


def run(spec: dict) -> None:
    accelerator = build_accelerator(
        spec["strategy"], precision="bf16" if spec["variant"] in ("bf16", "chance") else "no"
    )
    with keep_bf16_parameters(accelerator, is_wanted=spec["variant"] == "chance"):
        model, optimizer = accelerator.prepare(*build(spec["variant"], is_spoilt=spec["is_spoilt"]))
    drop_not_yet_unfrozen_from_zero_norm(model)
    try:
        results = train(accelerator, model, optimizer, spec)
    except CheckpointError as error:
        results = {"error": str(error)}
    results["engine"] = [kind.__name__ for kind in type(model).__mro__]
    if distributed.is_main():
        (Path(spec["results"])).write_text(json.dumps(results))
    if hasattr(model, "destroy"):
        model.destroy()
    del model, optimizer
    accelerator.free_memory()
    forget()
    gc.collect()


def train(accelerator, model, optimizer, spec: dict) -> dict:
    said: list[str] = []
    access = build_access(accelerator, model, optimizer)
    fingerprint = RunFingerprint({"model": "tiny", "variant": spec["variant"]}, settings={}, origin={})
    saver = Saver(
        Path(spec["folder"]),
        section=CheckpointSection(),
        access=access,
        run=fingerprint,
        on_saved=lambda saved: None,
        warn=lambda step, message: said.append(message),
    )
    found = find_checkpoint(Path(spec["folder"]), resume=spec.get("resume", "auto"), log=said.append)
    if found is not None and found.step > 0:
        warm_up_ddp_buckets(accelerator, model, loss=lambda: model(**batch(0, accelerator)).loss)
    step = 0
    if found is not None:
        checksums = ChecksumPrefetch()
        step = resume_checkpoint(
            found, access=access, run=fingerprint, allow_changes=(), log=said.append, checksums=checksums
        )["step"]
    losses = {}
    for target in spec["until"]:
        while step < target:
            losses[step] = take_step(accelerator, model, optimizer, step)
            step += 1
        if spec.get("evaluate"):
            with torch.no_grad():  # leaves FSDP's outermost module gathered
                model(**batch(step, accelerator))
        if target in spec["save"]:
            saver(Progress(step))
            saver.wait_for_writes()
    has_average = spec["variant"] == "groups"
    with AveragedWeights(access, AVERAGE, lambda _, average: average).swapped_in() if has_average else nullcontext():
        weights = gather_weights(accelerator, model, trained_only=False)
    trained = gather_weights(accelerator, model, trained_only=True)
    if distributed.is_main():
        torch.save(weights, spec["results"] + ".pt")
    dtypes = sorted({str(weight.dtype) for weight in weights.values()})
    return {"losses": losses, "digest": digest(weights), "dtypes": dtypes, "trained": sorted(trained), "said": said}


def take_step(accelerator, model, optimizer, step: int) -> float:
    begin_step(optimizer, step=step, learning_rate=1e-2)
    loss = model(**batch(step, accelerator)).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(distributed.sum_tensor(loss.detach().double())) / distributed.world()


def batch(step: int, accelerator) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    mine = rows[distributed.rank() :: distributed.world()].to(accelerator.device)
    return {"input_ids": mine, "labels": mine}


def build(variant: str, *, is_spoilt: bool):
    """Return model and optimizer; a spoilt model's trained weights are wrong, so that a checkpoint has to mend them."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=variant == "frozen",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16 if variant == "chance" else torch.float32)
    model.register_buffer("mark", torch.arange(3.0))  # as a BatchNorm keeps its statistics
    if variant == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0))
    if variant == "frozen":
        model.model.layers[0].requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    if is_spoilt:
        for each in [*trained, model.get_buffer("mark" if variant != "lora" else "base_model.model.mark")]:
            each.data.add_(0.1)
    if variant == "groups":
        return model, grouped_optimizer(model)
    if variant in LOW_BIT:
        return model, build_optimizer(list_parameters(model), LOW_BIT[variant], learning_rate=1e-2, seed=5)
    return model, plain_optimizer(variant, trained)


def grouped_optimizer(model) -> torch.optim.Optimizer:
    """Return one with six groups, one of which begins to learn after the save, and an average of the weights."""
    return build_optimizer(
        list_parameters(model),
        OptimizerSection(weight_decay=0.1, layer_decay=0.5),
        learning_rate=1e-2,
        unfreeze=[UnfreezeSection(patterns=("*embed*", "lm_head*"), after_steps=4)],
        average=AverageSection(decay=0.5, after_steps=1),
    )


def plain_optimizer(variant: str, trained: list) -> torch.optim.Optimizer:
    if variant == "adafactor":
        return Adafactor(trained, lr=1e-2, scale_parameter=False, relative_step=False)
    matrices = [each for each in trained if each.dim() > 1]
    vectors = [each for each in trained if each.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)


def build_accelerator(strategy: str, *, precision: str) -> Accelerator:
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "FSDP_VERSION", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)
    if strategy == "ddp":
        return Accelerator(cpu=True, mixed_precision=precision)
    with gloo_bridge() if not torch.cuda.is_available() else nullcontext():
        if strategy.startswith("fsdp"):
            return Accelerator(fsdp_plugin=fsdp_plugin(), mixed_precision=precision)
        if strategy == "hsdp":
            mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=distributed.world() // 2)
            return Accelerator(fsdp_plugin=fsdp_plugin(), parallelism_config=mesh)
        return Accelerator(deepspeed_plugin=deepspeed_plugin(strategy), mixed_precision=precision)


def fsdp_plugin() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def deepspeed_plugin(strategy: str) -> DeepSpeedPlugin:
    zero: dict = {"stage": int(strategy[4]), "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 10_000}
    if strategy.endswith("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = {
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": ROWS // distributed.world(),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def digest(weights: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, weight in weights.items():
        total.update(name.encode() + weight.float().numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
