"""Run by two processes under ZeRO-3: checks that the weights equal those of one process."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from finetune.config.sections.model import FromConfigSection, LoraSection, ModelSection
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.adapters.single_pass import use_single_pass
from finetune.model.loading.architecture import SpecialTokenIds
from finetune.model.loading.load import load_model
from finetune.model.size import measure_model
from finetune.runtime import distributed
from finetune.runtime.parameters import InitContext

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
MODELS = (("llama", GATED), ("gpt2", SIZES), ("qwen3", {**GATED, "head_dim": 8, "tie_word_embeddings": True}))
SETTINGS = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # partition the smallest too
    "train_micro_batch_size_per_gpu": 1,
}
BATCH = torch.arange(48).view(2, 24)
PARTITIONED = InitContext(gather=lambda parameters: deepspeed.zero.GatheredParameters(parameters, modifier_rank=0))


def build(section: ModelSection, construction: InitContext) -> PreTrainedModel:
    return load_model(
        section,
        head="causal_lm",
        init_context=construction,
        seed=7,
        vocabulary_size=300,
        special_ids=SpecialTokenIds(eos=0, pad=3),
    )


def adapted(section: ModelSection, construction: InitContext) -> torch.nn.Module:
    return add_adapter(
        build(section, construction),
        LoraSection(rank=2, dora=True, modules_to_save=("lm_head",)),
        AdapterContext(seed=1),
    )


def compare(partitioned: torch.nn.Module, whole: torch.nn.Module) -> int:
    """Return the number of parameters partitioned at creation; all values must equal those of the whole model."""
    num_partitioned = 0
    for (name, part), (_, expected) in zip(partitioned.named_parameters(), whole.named_parameters(), strict=True):
        if hasattr(part, "ds_id"):
            num_partitioned += part.numel() == 0
            with deepspeed.zero.GatheredParameters([part]):
                assert torch.allclose(part, expected, atol=1e-6), name
        else:
            assert torch.allclose(part, expected, atol=1e-6), name
    for (name, buffer), (_, expected) in zip(partitioned.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name
    assert measure_model(partitioned) == measure_model(whole)
    return num_partitioned


def with_trained_factors(section: ModelSection, construction: InitContext) -> PeftModel:
    """Return a model with LoRA in one pass, with factors that differ from those of a new adapter."""
    model = add_adapter(
        build(section, construction),
        LoraSection(rank=2, dropout=0.2),
        AdapterContext(seed=1, init_context=construction),
    )
    use_single_pass(model, in_place=True)
    generator = torch.Generator().manual_seed(0)
    for factor in (parameter for parameter in model.parameters() if parameter.requires_grad):
        with torch.no_grad(), construction.gather([factor]):
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.1)
    return model.train()


def compare_gradients(partitioned: PeftModel, whole: PeftModel) -> int:
    """Return the number of factors with the gradients of the whole model that are partitioned after each pass."""
    trained = [parameter for parameter in partitioned.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=partitioned,
        optimizer=torch.optim.SGD(trained),
        config={**SETTINGS, "zero_allow_untested_optimizer": True},
    )
    losses = []
    for model in (engine, whole):
        torch.manual_seed(0)
        losses.append(model(input_ids=BATCH, labels=BATCH, use_cache=False).loss)
    assert all(parameter.numel() == 0 for parameter in trained)
    engine.backward(losses[0])
    losses[1].backward()
    assert torch.allclose(*losses, atol=1e-6, rtol=0)
    expected = [parameter.grad for parameter in whole.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(safe_get_full_grad(parameter), gradient, rtol=1e-4, atol=1e-6)
    return sum(parameter.numel() == 0 for parameter in trained)


def main(folder: Path) -> None:
    deepspeed.init_distributed("gloo")
    sections = [ModelSection(from_config=FromConfigSection(model_type=kind, values=values)) for kind, values in MODELS]
    whole = [build(section, InitContext()) for section in sections]
    whole_adapted = adapted(sections[0], InitContext())
    whole_trained = with_trained_factors(sections[0], InitContext())
    if distributed.is_main():
        whole[0].save_pretrained(folder)
    distributed.barrier()
    settings = HfDeepSpeedConfig(SETTINGS)  # transformers partitions for as long as this lives
    torch.manual_seed(100 + distributed.rank())
    counts = [compare(build(section, PARTITIONED), one) for section, one in zip(sections, whole, strict=True)]
    counts.append(compare(adapted(sections[0], PARTITIONED), whole_adapted))
    counts.append(compare(build(ModelSection(name=str(folder)), PARTITIONED), whole[0]))
    counts.append(compare_gradients(with_trained_factors(sections[0], PARTITIONED), whole_trained))
    del settings
    distributed.barrier()
    torch.distributed.destroy_process_group()
    folder.with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(counts))


main(Path(sys.argv[1]))
