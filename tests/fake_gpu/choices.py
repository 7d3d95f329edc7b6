"""What a run chooses on a machine, as a table that a person can read: one file per kind of GPU in `choices/`.

python -m tests.fake_gpu.choices        writes the files anew, after a choice was changed on purpose
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from finetune.config.load import load_config
from finetune.data.loader import loader_settings
from finetune.model.attention import sample_attention
from finetune.registry.model_choices import PER_SAMPLE_ATTENTION
from finetune.run import start
from finetune.run.setup.patches import peak_flops
from finetune.task.lm_loss.target_loss import resolve_kernel
from finetune.task.model_inputs import unwrap_model
from finetune.train.step import TrainingComponents
from tests.fake_gpu.machine import MACHINES
from tests.fake_gpu.walk import Launch, Walk, walk
from tests.small_job import write_job

FOLDER = Path(__file__).with_name("choices")

LAUNCHES = {"1 GPU": Launch(), "8 GPUs, ddp": Launch("ddp", 1, 8), "2 x 8 GPUs, fsdp2": Launch("fsdp2", 2, 8)}

PRECISION = {"T4": "fp16"}
"""Where it is not bf16, which a T4 does not compute."""


def write_job_of(kind: str, folder: Path) -> Path:
    """Write the job: a full fine-tuning with what is `auto` by default."""
    path = write_job(folder)
    text = path.read_text().replace("global_batch_size: 8", "global_batch_size: 64")
    path.write_text(text.replace("steps: 8", f"steps: 8\n  precision: {PRECISION.get(kind, 'bf16')}"))
    return path


def table(kind: str, job: Path, folder: Path) -> str:
    """Return the table of a kind of GPU: a line per choice, a column per launch."""
    columns = [choices(kind, job, folder / str(number), launch) for number, launch in enumerate(LAUNCHES.values())]
    machine = MACHINES[kind]
    rows = [["", *LAUNCHES], *([name, *(column[name] for column in columns)] for name in columns[0])]
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    major, minor = machine.capability
    size = f"{machine.memory_bytes / 2**30:.1f} GiB"
    head = f"{machine.name}, sm_{major}{minor}, {size}, {machine.cores_per_gpu} cores per GPU"
    return "\n".join([head, "", *lines]) + "\n"


def choices(kind: str, job: Path, folder: Path, launch: Launch) -> dict[str, str]:
    """Return the choices of the run's start, by name; no step is taken."""
    chosen: dict[str, str] = {}

    def choose(walked: Walk) -> None:
        assert walked.components is not None
        chosen.update(_choices(job, walked.components, walked.groups))

    walk(job, folder, machine=kind, launch=launch, inspect=choose, takes_steps=False)
    return chosen


def _choices(job: Path, components: TrainingComponents, groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    config = load_config(job, []).config
    accelerator, device = components.accelerator, components.accelerator.device
    loader = loader_settings(config.data)
    with patch.object(start, "has_virtual_memory", lambda: True):
        start.use_expandable_segments(variables := {})
    optimizer = components.optimizer.optimizer
    group = optimizer.param_groups[0]
    flops = peak_flops(device, precision=config.train.precision, world=accelerator.num_processes)
    opened = [_group(each) for each in groups]
    return {
        "device": str(device),
        "distributed type": accelerator.distributed_type.name,
        "model": type(components.model).__name__,
        "precision": _precision(components),
        "tf32": f"{torch.get_float32_matmul_precision()}, cudnn {_yes(torch.backends.cudnn.allow_tf32)}",
        "attention": _attention(components),
        "loss": resolve_kernel(config.train.loss_kernel)[0],
        "compile": config.model.compile,
        "optimizer": type(optimizer).__name__ + (", fused" if group.get("fused") else ""),
        "skips on device": _yes(components.update.finite_check is not None),
        "gradients": "each microbatch" if components.reduces_every_microbatch else "once a step",
        "allocator": " ".join(f"{name}={value}" for name, value in variables.items()),
        "workers": f"{loader.num_workers}, prefetch {loader.prefetch_factor}",
        "pinned batches": _yes(loader.pin_memory),
        "default group": opened[0] if opened else "none",
        "other groups": "; ".join(opened[1:]) or "none",
        "peak FLOP/s": f"{flops:.3g}" if flops else "unknown",
    }


def _precision(components: TrainingComponents) -> str:
    mode = components.accelerator.mixed_precision
    scaler = components.accelerator.scaler
    plugin = getattr(components.accelerator.state, "fsdp_plugin", None)
    policy = "autocast" if plugin is None else f"reduced in {str(plugin.mixed_precision_policy.reduce_dtype)[6:]}"
    return f"{mode}, {policy}" + ("" if scaler is None else ", scaled loss")


def _attention(components: TrainingComponents) -> str:
    name = unwrap_model(components.model).config._attn_implementation
    if name != PER_SAMPLE_ATTENTION:
        return str(name)
    kernels = sample_attention._available
    return f"{name}, " + ("varlen kernel" if kernels.is_capable and kernels.torch_varlen else "sample by sample")


def _group(arguments: Mapping[str, Any]) -> str:
    timeout, device = arguments.get("timeout"), arguments.get("device_id")
    return f"{arguments['backend']}, {timeout}" + ("" if device is None else f", {device}")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in MACHINES:
            job = write_job_of(kind, Path(folder) / kind)
            (FOLDER / f"{kind}.txt").write_text(table(kind, job, job.parent / "runs"))


if __name__ == "__main__":
    main()
