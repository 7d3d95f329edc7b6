"""Unsupported parallelism and platforms: the settings that request them, the reason, and the alternative.

They are detected in the launcher's settings, and in an accelerate file before the launch, since ranks do not see some
of its settings.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """An unsupported feature."""

    name: str
    why: str
    instead: str

    def sentence(self, setting: str) -> str:
        """Return the message for this setting."""
        return f"{setting}: {self.name} is not supported: {self.why}. {self.instead}."


TENSOR = Unsupported(
    "tensor parallelism next to other parallelism than FSDP2, or of a size that does not divide the processes",
    "either groups of processes that share the layers are copies of one another, or FSDP2 shards what each of them "
    "holds, over 2 processes or more (`dp_shard_size`), without `parallelism_config_sp_size`",
    "Launch with accelerate_configs/tensor_parallel.yaml, where the size divides `num_processes`, with "
    "fsdp2_tensor_parallel.yaml, or with fsdp2.yaml or zero3.yaml, which shard every layer over all processes. If that "
    "is not enough, use torchtitan or Megatron-LM",
)
PIPELINE = Unsupported(
    "pipeline parallelism",
    "it needs a model in stages, into which neither Accelerate nor DeepSpeed's engine divides it, and pays where there "
    "are more than 8 GPUs for each sample of a step (docs/proof/scaling.md)",
    "Remove it, and launch with accelerate_configs/fsdp2.yaml or zero3.yaml, or with fsdp2_tensor_parallel.yaml where "
    "GPUs outnumber samples. For stages, use torchtitan, nanotron or Megatron-LM",
)
EXPERT = Unsupported(
    "expert parallelism",
    "its gradients and checkpoints differ from data parallelism (transformers#48208)",
    "Remove it: FSDP2 and ZeRO-3 shard experts like all parameters. For token routing, use Megatron-LM, "
    "torchtitan or DeepSpeed-MoE",
)
MEGATRON = Unsupported(
    "Megatron-LM",
    "it has its own models, data loader and step",
    "Use Megatron-LM itself, or NVIDIA NeMo, which converts Hugging Face weights, or launch with "
    "accelerate_configs/fsdp2.yaml",
)
CONTEXT = Unsupported(
    "ring context parallelism",
    "it drops the attention mask, so that samples of a pack attend to each other (accelerate#4177, trl#6843; "
    "axolotl#3608: 1.83 times the loss)",
    "Use sequence parallelism (Ulysses), which is exact: `parallelism_config_sp_size`",
)
TPU = Unsupported(
    "a TPU (XLA)",
    "strategies, checkpoints and seeds of this package are not tested on TPUs",
    "Use MaxText, or a machine with GPUs",
)
SAGEMAKER = Unsupported(
    "SageMaker's launcher",
    "it uploads only one script, without the job and this package",
    "Write `compute_environment: LOCAL_MACHINE`, and start `accelerate launch` in the container of the SageMaker job",
)
DYNAMO = Unsupported(
    "`dynamo_backend`",
    "it recompiles the model for every length and every hook",
    "Write `dynamo_backend: 'no'`, and `model.compile: regional` in the job",
)
NVME = Unsupported(
    "NVMe offload",
    "optimizer state and parameters on NVMe cannot be saved in the checkpoint format",
    "Write `cpu`, as in ds_configs/zero3_offload.json",
)
UNKNOWN = Unsupported(
    "such a size",
    "Accelerate would silently ignore it",
    "Remove it",
)

_SIZES: Mapping[str, Unsupported] = {"cp": CONTEXT, "pp": PIPELINE, "ep": EXPERT}
_KNOWN_SIZES = ("dp_replicate", "dp_shard", "sp", "tp")
_DEEPSPEED_SECTIONS: Mapping[str, Unsupported] = {"pipeline": PIPELINE, "tensor_parallel": TENSOR}
_OFFLOADS = ("offload_optimizer", "offload_param")
_PREFIX = "parallelism_config_"


def unsupported_by_environment(variables: Mapping[str, str], deepspeed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a message for each launcher variable and DeepSpeed section that requests an unsupported feature."""
    problems = [
        feature.sentence(f"{_PREFIX}{name}_size: {size}")
        for name, feature in _SIZES.items()
        if (size := variables.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")) not in ("", "1", "None")
    ]
    flags = {
        "ACCELERATE_USE_MEGATRON_LM": ("distributed_type: MEGATRON_LM", MEGATRON),
        "ACCELERATE_USE_SAGEMAKER": ("compute_environment: AMAZON_SAGEMAKER", SAGEMAKER),
        "ACCELERATE_IN_TPU_POD": ("distributed_type: XLA", TPU),
    }
    for name, (written, feature) in flags.items():
        if variables.get(name, "false").lower() in ("1", "true", "yes"):
            problems.append(feature.sentence(written))
    if variables.get("PJRT_DEVICE", "").upper() == "TPU":
        problems.append(TPU.sentence("PJRT_DEVICE: TPU"))
    backend = variables.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        problems.append(DYNAMO.sentence(f"dynamo_backend: {backend}"))
    for name in _OFFLOADS:
        if variables.get(f"ACCELERATE_DEEPSPEED_{name.upper()}_DEVICE") == "nvme":
            problems.append(NVME.sentence(f"{name}_device: nvme"))
    return (*problems, *(feature.sentence(written) for written, feature in _in_deepspeed(deepspeed)))


def _in_deepspeed(config: Mapping[str, Any]) -> Iterator[tuple[str, Unsupported]]:
    for name, feature in _DEEPSPEED_SECTIONS.items():
        if config.get(name):
            yield f"the DeepSpeed config's section `{name}`", feature
    for name in _OFFLOADS:
        if _section(_section(config, "zero_optimization"), name).get("device") == "nvme":
            yield f"the DeepSpeed config's `zero_optimization.{name}.device: nvme`", NVME


def uneven_groups(size: int, world: int) -> str:
    """Return the message for groups of a size that does not divide the processes.

    >>> uneven_groups(2, 3)
    '`2` on 3 processes is not supported: it does not divide them. Write a divisor of 3 (see tensor_parallel.yaml).'
    """
    processes = f"{world} process{'es' * (world > 1)}"
    divisor = f"Write a divisor of {world} (see tensor_parallel.yaml)"
    return f"`{size}` on {processes} is not supported: it does not divide them. {divisor}."


def may_split_layers(size: int, *, world: int, copies: int, rows: int, engine: str | None) -> bool:
    """Return whether groups of `size` processes can share layers: as copies of one another, or sharded by FSDP2.

    `rows`: the processes that share rows; `engine`: `fsdp`, `zero` or None.
    """
    if size <= 1 or rows > 1:
        return size == 1
    if engine is None:
        return world % size == 0 and copies in (1, world // size)
    return engine == "fsdp" and world % (copies * size) == 0 and world > copies * size


def engine_in_file(values: Mapping[str, Any]) -> str | None:
    """Return `fsdp` or `zero`, as an accelerate file says; None for neither."""
    return {"FSDP": "fsdp", "DEEPSPEED": "zero"}.get(str(values.get("distributed_type", "")).upper())


def unsupported_in_file(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the message for each setting of an accelerate file that requests an unsupported feature."""
    distributed_type = str(values.get("distributed_type", "")).upper()
    if distributed_type == "MEGATRON_LM":
        yield "distributed_type", MEGATRON.sentence(f"`{distributed_type}`")
    if distributed_type in ("XLA", "TPU"):
        yield "distributed_type", TPU.sentence(f"`{distributed_type}`")
    if str(values.get("compute_environment", "")).upper() == "AMAZON_SAGEMAKER":
        yield "compute_environment", SAGEMAKER.sentence("`AMAZON_SAGEMAKER`")
    for key, size in _section(values, "parallelism_config").items():
        name = str(key).removeprefix(_PREFIX).removesuffix("_size")
        if str(key).endswith("_size") and name not in _KNOWN_SIZES and size not in (None, 1):
            yield f"parallelism_config.{key}", _SIZES.get(name, UNKNOWN).sentence(f"`{size}`")
    sizes = _section(values, "parallelism_config")
    tensor_size, copies, rows = (sizes.get(f"{_PREFIX}{name}_size") or 1 for name in ("tp", "dp_replicate", "sp"))
    world, engine = values.get("num_processes", 1), engine_in_file(values)
    are_counts = all(isinstance(count, int) for count in (tensor_size, copies, rows, world))
    if are_counts and tensor_size > 0 and world % tensor_size:
        yield f"parallelism_config.{_PREFIX}tp_size", uneven_groups(tensor_size, world)
    elif are_counts and not may_split_layers(tensor_size, world=world, copies=copies, rows=rows, engine=engine):
        yield f"parallelism_config.{_PREFIX}tp_size", TENSOR.sentence(f"`{tensor_size}`")
    for key, backend in _section(values, "dynamo_config").items():
        if str(key).removeprefix("dynamo_") == "backend" and str(backend).lower() not in ("no", "false", "none"):
            yield f"dynamo_config.{key}", DYNAMO.sentence(f"`{backend}`")
    for key, value in _section(values, "deepspeed_config").items():
        if str(key).startswith(_OFFLOADS) and value == "nvme":
            yield f"deepspeed_config.{key}", NVME.sentence("`nvme`")
    for written, feature in _in_deepspeed(_deepspeed_file(values)):
        yield "deepspeed_config.deepspeed_config_file", feature.sentence(written)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _deepspeed_file(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the DeepSpeed config that the file names; empty if it cannot be read, which the launch reports."""
    name = _section(values, "deepspeed_config").get("deepspeed_config_file")
    try:
        content = json.loads(Path(str(name)).read_text(encoding="utf-8")) if name else {}
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
