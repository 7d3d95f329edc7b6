"""The launcher's settings, read from the variables of this process or from an accelerate file.

FSDP1's settings run under FSDP2, translated as `accelerate to-fsdp2` does (`commands/to_fsdp2.py` of 1.15). Its own
default is `fsdp_version: 1`, so `accelerate config` writes such files. Unsupported parallelism and platforms are found
in the variables and in a file, some of whose settings ranks do not see.
"""

import json
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import StrategyError


@dataclass(frozen=True)
class LaunchEnvironment:
    """The settings of `accelerate launch` or torchrun, if any, for this process."""

    world: int = 1
    rank: int = 0
    has_device: bool = False  # an accelerator that torch can use
    has_process_group: bool = False  # started by a launcher, possibly as the only process
    is_fsdp: bool = False
    zero_stage: int | None = None  # None: no DeepSpeed
    replicate_size: int = 1  # HSDP: copies of the sharded model
    shard_size: int = 1  # HSDP: the setting for the processes that share one copy
    sequence_size: int = 1  # consecutive processes that share the tokens of every row
    tensor_size: int = 1  # consecutive processes that share the matrices of every layer
    precision: str = "no"  # of the accelerate config; `no` leaves it to the job
    fsdp_activation_checkpointing: bool = False
    fsdp_forward_prefetch: bool = False
    fsdp_offload_params: bool = False
    cpu_ram_efficient_loading: bool = False
    unsupported: tuple[str, ...] = ()  # a message for each setting that is not supported
    deepspeed: Mapping[str, Any] = field(default_factory=dict)  # the DeepSpeed config file, as written


def read_environment(variables: Mapping[str, str], *, has_device: bool) -> LaunchEnvironment:
    """Return the launcher's settings; raises StrategyError for a DeepSpeed config file that cannot be read."""
    deepspeed: Mapping[str, Any] = {}
    zero_stage: int | None = None
    if is_true(variables, "ACCELERATE_USE_DEEPSPEED"):
        name = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
        deepspeed = _read_json_object(None if name == "none" else name)
        in_file = deepspeed.get("zero_optimization", {}).get("stage")
        zero_stage = int(in_file if in_file is not None else variables.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    return LaunchEnvironment(
        world=int(variables.get("WORLD_SIZE", "1")),
        rank=int(variables.get("RANK", "0")),
        has_device=has_device,
        has_process_group="LOCAL_RANK" in variables,
        is_fsdp=is_true(variables, "ACCELERATE_USE_FSDP"),
        zero_stage=zero_stage,
        replicate_size=int(variables.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1")),
        shard_size=int(variables.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", "1")),
        sequence_size=int(variables.get("PARALLELISM_CONFIG_SP_SIZE", "1")),
        tensor_size=int(variables.get("PARALLELISM_CONFIG_TP_SIZE", "1")),
        precision=variables.get("ACCELERATE_MIXED_PRECISION", "no"),
        fsdp_activation_checkpointing=is_true(variables, "FSDP_ACTIVATION_CHECKPOINTING"),
        fsdp_forward_prefetch=is_true(variables, "FSDP_FORWARD_PREFETCH"),
        fsdp_offload_params=is_true(variables, "FSDP_OFFLOAD_PARAMS"),
        cpu_ram_efficient_loading=is_true(variables, "FSDP_CPU_RAM_EFFICIENT_LOADING"),
        unsupported=unsupported_by_environment(variables, deepspeed),
        deepspeed=deepspeed,
    )


def require_launcher(variables: Mapping[str, str]) -> None:
    """Raise StrategyError for a strategy of several processes in one that no launcher has started.

    The variables are left over from a shell or a notebook that `accelerate launch` has started, or from a container.
    """
    flags = [name for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED") if is_true(variables, name)]
    if not flags or "LOCAL_RANK" in variables:
        return
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
    rest = sorted(name for name in variables if name.startswith(prefixes) and name not in flags)
    raise StrategyError(
        f"{flags[0]}={variables[flags[0]]} is set in the environment, but no launcher has started this process: there "
        f"are no processes to shard over. For one process: unset {' '.join([*flags, *rest])}. For several, start with "
        "--accelerate FILE --processes N or `accelerate launch`."
    )


def is_true(variables: Mapping[str, str], name: str) -> bool:
    """Return whether the launcher has set this variable to true."""
    return variables.get(name, "false").lower() in ("true", "1", "yes")


def _read_json_object(name: str | None) -> Mapping[str, Any]:
    """Return the DeepSpeed config of this path, empty without one; raises StrategyError if it cannot be read."""
    if name is None:
        return {}
    try:
        content = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"the DeepSpeed config {name} cannot be read ({error}). `deepspeed_config_file` in the accelerate config "
            f"is relative to the folder in which you launch, {Path.cwd()}, or to that of the accelerate file."
        ) from error
    if not isinstance(content, dict):
        raise StrategyError(f"the DeepSpeed config {name} is not a JSON object.")
    return content


_RESHARDS: Mapping[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
"""FSDP1's sharding strategies, and whether FSDP2 frees what it gathered after a forward pass."""

_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
_WITHOUT_EFFECT = ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
"""FSDP2 always prefetches in the backward pass, sends weights where one rank loads them, and keeps parameters."""

_UNSUPPORTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "fsdp_auto_wrap_policy": (("SIZE_BASED_WRAP",), "TRANSFORMER_BASED_WRAP"),  # it would wrap the list of layers
    "fsdp_state_dict_type": (("LOCAL_STATE_DICT", "2"), "SHARDED_STATE_DICT"),
}
"""Values that FSDP2 does not support, and what to write instead."""


@dataclass(frozen=True)
class Translation:
    """The translation of FSDP1's settings; all others mean the same under FSDP2."""

    reshards: bool  # fsdp_reshard_after_forward
    removed: tuple[str, ...]  # keys
    sentence: str
    problems: tuple[tuple[str, str], ...]  # key and message of each setting that FSDP2 does not support


def to_fsdp2(settings: Mapping[str, Any]) -> Translation:
    """Return the translation of FSDP1's settings, by the keys of `fsdp_config`.

    >>> print(to_fsdp2({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_use_orig_params": True}).sentence)
    fsdp_version: 1 runs under FSDP2, with the same losses. fsdp_sharding_strategy: SHARD_GRAD_OP is \
fsdp_reshard_after_forward: false. Without effect: fsdp_use_orig_params. `accelerate to-fsdp2` rewrites the file.
    """
    reshards, changes, problems = True, [], []
    for key in (_STRATEGY, _RESHARD):  # the launcher sets both, one of them by default
        name = str(settings.get(key, True)).upper()
        if name in _RESHARDS:
            changes.append(f"{key}: {name} is {_RESHARD}: {str(_RESHARDS[name]).lower()}.")
        elif name not in ("TRUE", "FALSE"):
            problems.append((key, f"FSDP2 does not support `{settings[key]}`. Write `{_RESHARD}: true`, or `false`."))
        reshards = reshards and _RESHARDS.get(name, name == "TRUE")
    for key, (values, instead) in _UNSUPPORTED.items():
        if str(settings.get(key)).upper() in values:
            problems.append((key, f"FSDP2 does not support `{settings[key]}`. Write `{instead}`."))
    if unused := [key for key in _WITHOUT_EFFECT if key in settings]:
        changes.append(f"Without effect: {', '.join(unused)}.")
    first, last = "fsdp_version: 1 runs under FSDP2, with the same losses.", "`accelerate to-fsdp2` rewrites the file."
    removed = tuple(key for key in (_STRATEGY, *_WITHOUT_EFFECT) if key in settings)
    return Translation(reshards, removed, " ".join((first, *changes, last)), tuple(problems))


def use_fsdp2(variables: MutableMapping[str, str]) -> list[str]:
    """Replace the launcher's variables for FSDP1 by those for FSDP2, and return a sentence that names them.

    If they are not set, nothing changes. Raises StrategyError with every setting that FSDP2 does not support.
    """
    if not is_true(variables, "ACCELERATE_USE_FSDP") or variables.get("FSDP_VERSION") == "2":
        return []
    translation = to_fsdp2({name.lower(): value for name, value in variables.items() if name.startswith("FSDP_")})
    if translation.problems:
        listed = "\n".join(f"  {key}: {message}" for key, message in translation.problems)
        raise StrategyError(f"fsdp_version: 1 runs under FSDP2, which does not support every setting\n{listed}")
    for key in translation.removed:
        del variables[key.upper()]
    variables.update({"FSDP_VERSION": "2", _RESHARD.upper(): str(translation.reshards).lower()})
    return [translation.sentence]


def fsdp1_in_file(values: Mapping[str, Any]) -> Translation | None:
    """Return the translation of an accelerate file's settings for FSDP1; None if it has none."""
    section = values.get("fsdp_config")
    written = section.items() if isinstance(section, Mapping) else ()
    settings = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in written}
    is_fsdp1 = str(settings.get("fsdp_version", 1)) != "2"
    is_fsdp = str(values.get("distributed_type", "")).upper() == "FSDP"
    return to_fsdp2(settings) if is_fsdp and is_fsdp1 else None


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
    problems += [feature.sentence(written) for name, (written, feature) in flags.items() if is_true(variables, name)]
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
    for key, backend in _section(values, "dynamo_config").items():
        if str(key).removeprefix("dynamo_") == "backend" and str(backend).lower() not in ("no", "false", "none"):
            yield f"dynamo_config.{key}", DYNAMO.sentence(f"`{backend}`")
    for key, value in _section(values, "deepspeed_config").items():
        if str(key).startswith(_OFFLOADS) and value == "nvme":
            yield f"deepspeed_config.{key}", NVME.sentence("`nvme`")
    for written, feature in _in_deepspeed(_read_deepspeed_config(values)):
        yield "deepspeed_config.deepspeed_config_file", feature.sentence(written)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _read_deepspeed_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the DeepSpeed config that the file names; empty if it cannot be read, which the launch reports."""
    name = _section(values, "deepspeed_config").get("deepspeed_config_file")
    with suppress(StrategyError):
        return _read_json_object(str(name) if name else None)
    return {}
