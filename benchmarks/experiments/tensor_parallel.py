"""What Accelerate and transformers make of tensor parallelism: run once more when either of them changes.

    python benchmarks/experiments/tensor_parallel.py        # about a minute on two cores

Trains a small Llama for four steps on one process, and with `ParallelismConfig` on gloo ranks: tensor parallel alone,
and beside FSDP2, loaded as each library says. Prints losses or the error. `finetune/strategy/unsupported.py` says what
follows from it.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = {
    "tensor parallel alone, DistributedConfig": (2, 1, "config"),
    "beside FSDP2, DistributedConfig": (2, 2, "config"),
    "beside FSDP2, plan applied on Accelerate's mesh": (2, 2, "mesh"),
}
STEPS = 4


def main() -> int:
    """Run every case and print a table in Markdown."""
    if len(sys.argv) > 1:
        return work(Path(sys.argv[1]), tensor=int(sys.argv[2]), shards=int(sys.argv[3]), loading=sys.argv[4])
    with tempfile.TemporaryDirectory() as folder:
        print(f"| what | losses or error |\n|---|---|\n| one process | {_run(folder, 1, 1, 'config')} |")
        for name, (tensor, shards, loading) in CASES.items():
            print(f"| {name}, {tensor * shards} ranks | {_run(folder, tensor, shards, loading)} |", flush=True)
    return 0


def _run(folder: str, tensor: int, shards: int, loading: str) -> str:
    """Return what rank 0 printed, or the last error."""
    words = [str(Path(__file__).resolve()), folder, str(tensor), str(shards), loading]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={tensor * shards}"]
    environment = {**os.environ, "ACCELERATE_TORCH_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*launcher, *words], env=environment, capture_output=True, text=True, check=False)
    losses = re.findall(r"^losses: (.*)$", done.stdout, re.MULTILINE)
    errors = re.findall(r"^\[rank\d+\]: (\w+Error: .*)$", done.stderr, re.MULTILINE)
    return losses[0] if losses else re.sub(r" \(/.*\)", "", errors[-1]) if errors else done.stderr[-300:]


def work(folder: Path, *, tensor: int, shards: int, loading: str) -> int:
    """Train on this rank."""
    import torch
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    if tensor * shards == 1:
        torch.manual_seed(0)
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
        AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)  # as on GPUs
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    several = ParallelismConfig(tp_size=tensor, dp_shard_size=shards) if tensor > 1 else None
    accelerator = Accelerator(parallelism_config=several, fsdp_plugin=fsdp if shards > 1 else None)
    asked = DistributedConfig(tp_size=tensor, fsdp_size=1) if tensor > 1 else None
    if loading == "config":
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=asked)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
        plan, *_ = model._resolve_parallel_plans(asked)
        model = apply_tensor_parallelism(model, accelerator.torch_device_mesh["tp"], plan)
        model.config.distributed_config = asked
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        part = ids.chunk(shards)[accelerator.process_index // tensor]
        loss = model(input_ids=part, labels=part).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(f"{loss.item():.6f}")
    if accelerator.is_main_process:
        print("losses:", ", ".join(losses), flush=True)
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
