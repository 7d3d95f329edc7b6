"""The accelerate file, and its counterpart for processes on the CPU of this machine."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from finetune.commands.rehearse.report import Change
from finetune.config.load import read_text_file
from finetune.config.yaml import read_yaml
from finetune.errors import StrategyError, UserError
from finetune.registry.accelerate_files import find_deepspeed_file
from finetune.strategy.environment import (
    TENSOR,
    engine_in_file,
    fsdp1_in_file,
    may_split_layers,
    unsupported_in_file,
)

DISTRIBUTED_TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")

_REAL_MACHINES = (
    "main_process_",
    "rdzv_",
    "gpu_ids",
    "enable_cpu_affinity",
    "same_network",
    "tpu_",
    "deepspeed_hostfile",
    "deepspeed_multinode",
    "deepspeed_exclusion",
    "deepspeed_inclusion",
)
"""Beginnings of the keys that hold for the real machines alone."""

_COPIES, _SHARDS = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
_SEQUENCE, _TENSOR = "parallelism_config_sp_size", "parallelism_config_tp_size"
_SECTIONS = ("parallelism_config", "fsdp_config", "deepspeed_config")
_MAX_COUNT = 10**6
"""Limit on the processes of a launch: larger numbers are typing errors."""


@dataclass(frozen=True)
class AccelerateFile:
    """The file, with its numbers of processes and machines."""

    path: Path
    values: dict[str, Any]
    distributed_type: str
    num_processes: int
    num_machines: int

    @property
    def sequence_size(self) -> int:
        """Return the number of processes that share the rows of a microbatch."""
        return _parallelism(self.values)[_SEQUENCE]

    @property
    def tensor_size(self) -> int:
        """Return the number of processes that share the matrices of every layer."""
        return _parallelism(self.values)[_TENSOR]

    @property
    def num_copies(self) -> int:
        """Return the number of copies of a sharded model (HSDP)."""
        return _parallelism(self.values)[_COPIES]

    @property
    def data_parallel_size(self) -> int:
        """Return the number of microbatches that are computed at a time."""
        return self.num_processes // (self.sequence_size * self.tensor_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a sentence on what becomes of settings for FSDP1, where the file has any."""
        translation = fsdp1_in_file(self.values)
        return () if translation is None else (translation.sentence,)

    @property
    def text(self) -> str:
        """Return strategy, machines and processes in words."""
        machines = f"{self.num_machines} machine{'s' * (self.num_machines > 1)}"
        local = self.num_processes // self.num_machines
        return f"{self.path.stem}: {machines} x {local} process{'es' * (local > 1)} = {self.num_processes}"


def read_accelerate_file(path: Path) -> AccelerateFile:
    """Return the file's content; raises UserError or StrategyError if it cannot be launched."""
    try:
        document = read_yaml(read_text_file(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--accelerate {path}: it cannot be read: {getattr(error, 'strerror', error)}.") from error
    if document.problems or not isinstance(document.values, dict):
        problem = document.problems[0] if document.problems else "it has no keys."
        raise UserError(f"--accelerate {path}: {problem}")
    values, lines = document.values, document.lines
    section = values.get("deepspeed_config")
    if isinstance(section, dict) and isinstance(written := section.get("deepspeed_config_file"), str):
        section["deepspeed_config_file"] = str(find_deepspeed_file(written, accelerate_file=path))

    def failure(key: str, message: str) -> StrategyError:
        return StrategyError(f"{path.name}{f', line {lines[key]}' if key in lines else ''}, {key}: {message}")

    for key, message in unsupported_in_file(values):
        raise failure(key, message)
    if (translation := fsdp1_in_file(values)) is not None:
        for key, message in translation.problems:
            raise failure(f"fsdp_config.{key}", message)
    written = values.get("distributed_type")
    distributed_type = str(values.get("distributed_type", "missing")).upper().replace("FALSE", "NO")
    if distributed_type not in DISTRIBUTED_TYPES:
        supported = ", ".join(DISTRIBUTED_TYPES)
        raise failure("distributed_type", f"`{written}` is not supported. Write one of {supported}.")
    for key, message in _wrong_types(values):
        raise failure(key, message)
    counts = []
    for key in ("num_processes", "num_machines"):
        count = values.get(key, 1)
        if not _is_count(count):
            raise failure(key, f"`{count}` is not a number of {key.removeprefix('num_')}. Write 1 or more.")
        counts.append(count)
    file = AccelerateFile(path, values, distributed_type, *counts)
    for key, message in _problems(file):
        raise failure(key, message)
    return file


def with_copies_for(file: AccelerateFile, world: int) -> AccelerateFile:
    """Return the file with as many copies of a sharded model (HSDP) as these processes have; others as they are."""
    if file.num_copies == 1:
        return file
    sizes = _parallelism(file.values)
    copies = max(1, world * sizes[_COPIES] // math.prod(sizes.values()))
    parallelism = {**file.values["parallelism_config"], _COPIES: copies}
    values = {**file.values, "parallelism_config": parallelism, "num_processes": world, "num_machines": 1}
    return replace(file, values=values, num_processes=world, num_machines=1)


def for_world(file: AccelerateFile, world: int, *, num_nodes: int = 1) -> AccelerateFile:
    """Return the file for this number of processes, with a copy of a sharded model (HSDP) on each of several hosts.

    Raises StrategyError where they cannot be launched so.
    """
    if file.distributed_type == "NO" and world > 1:
        raise StrategyError(
            f"--accelerate {file.path}: distributed_type NO is for one process, and there are {world}. Choose ddp."
        )
    values, sizes = file.values, _parallelism(file.values)
    if num_nodes > 1 and file.num_copies > 1:
        shards = max(1, world // num_nodes // sizes[_SEQUENCE] // sizes[_TENSOR])
        values = {**values, "parallelism_config": {**sizes, _COPIES: num_nodes, _SHARDS: shards}}
    file = replace(file, values=values, num_processes=world, num_machines=1)
    for key, message in _problems(file):
        raise StrategyError(f"--accelerate {file.path}: {key}: {message}")
    return file


def data_parallel_size(path: Path, *, num_processes: int | None = None) -> int:
    """Return the number of microbatches that are computed at a time on this number of processes, or the file's own.

    Raises UserError or StrategyError where the file cannot be launched so.
    """
    file = read_accelerate_file(path)
    return for_world(file, file.num_processes if num_processes is None else num_processes).data_parallel_size


def _wrong_types(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and a message for each section or value of a wrong type."""
    for name in _SECTIONS:
        section = values.get(name)
        if section is not None and not isinstance(section, dict):
            yield name, f"`{section}` is not a section. Write keys with values."
            return
    for name, size in (values.get("parallelism_config") or {}).items():
        if name in (_COPIES, _SHARDS, _SEQUENCE, _TENSOR) and size is not None and not _is_count(size):
            yield f"parallelism_config.{name}", f"`{size}` is not a number of processes. Write 1 or more."
    named = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if named is not None and not isinstance(named, str):
        yield "deepspeed_config.deepspeed_config_file", f"`{named}` is not the name of a file."


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MAX_COUNT


def _problems(file: AccelerateFile) -> Iterator[tuple[str, str]]:
    """Yield the key and a message for each problem on the real machines."""
    total, machines = file.num_processes, file.num_machines
    if total % machines:
        yield (
            "num_processes",
            f"{total} cannot be shared by {machines} machines. It counts the processes of all machines together: "
            f"write {machines} x the GPUs of one machine.",
        )
    if file.values.get("use_cpu") is True and total > 1:
        yield (
            "use_cpu",
            f"with `true`, accelerate starts one process instead of {total} unless mpirun is installed. Write `false`.",
        )
    sizes = _parallelism(file.values)
    rows, layers = sizes[_SEQUENCE], sizes[_TENSOR]
    product = sizes[_COPIES] * sizes[_SHARDS] * rows * layers
    if max(sizes[_COPIES], sizes[_SHARDS]) > 1 and product != total:
        shared = f" x {rows} that share rows" if rows > 1 else ""
        shared += f" x {layers} that share layers" if layers > 1 else ""
        yield (
            f"parallelism_config.{_COPIES}",
            f"{sizes[_COPIES]} copies x {sizes[_SHARDS]} shards{shared} are {product} processes, and num_processes is "
            f"{total}.",
        )
    if total % rows:
        yield f"parallelism_config.{_SEQUENCE}", f"{rows} does not divide the {total} processes. Write a divisor."
    if total % layers:
        yield f"parallelism_config.{_TENSOR}", f"{layers} does not divide the {total} processes. Write a divisor."
    elif not may_split_layers(
        layers, world=total, copies=sizes[_COPIES], rows=rows, engine=engine_in_file(file.values)
    ):
        yield f"parallelism_config.{_TENSOR}", TENSOR.sentence(f"{layers} on {total} processes")


def _parallelism(values: dict[str, Any]) -> dict[str, int]:
    written = values.get("parallelism_config") or {}
    return {name: written.get(name) or 1 for name in (_COPIES, _SHARDS, _SEQUENCE, _TENSOR)}


def for_this_machine(file: AccelerateFile, *, processes: int, is_fp16: bool) -> tuple[AccelerateFile, list[Change]]:
    """Return the file for this number of processes on this machine, and the changes.

    `is_fp16`: the job trains in fp16, which CPUs do not support. Raises UserError for a number of processes that cannot
    represent the real one.
    """
    values = json.loads(json.dumps(file.values))
    is_single = file.distributed_type == "NO"
    processes = 1 if is_single else processes
    why = "processes on this machine's CPU, connected by gloo"
    changes = [
        Change("num_processes", file.num_processes, processes, why),
        Change("num_machines", file.num_machines, 1, "this machine"),
    ]
    values |= {
        "num_processes": processes,
        "num_machines": 1,
        "machine_rank": 0,
        "distributed_type": file.distributed_type,
        "use_cpu": is_single,
    }
    for section in (values, values.get("deepspeed_config") or {}):
        for key in [key for key in section if key.startswith(_REAL_MACHINES)]:
            changes.append(Change(key, section.pop(key), None, "only for the real machines"))
    changes += _share_processes(values, processes, was=file.num_processes)
    if (values.get("fsdp_config") or {}).get("fsdp_offload_params") is True:
        values["fsdp_config"]["fsdp_offload_params"] = False
        changes.append(Change("fsdp_config.fsdp_offload_params", True, False, "a CPU cannot offload"))
    if is_fp16 and values.get("mixed_precision") == "fp16":
        values["mixed_precision"] = "bf16"
        changes.append(Change("mixed_precision", "fp16", "bf16", "a CPU does not train in fp16"))
    local = replace(file, values=values, num_processes=processes, num_machines=1)
    return local, [change for change in changes if change.was != change.now]


def _share_processes(values: dict[str, Any], processes: int, *, was: int) -> Iterator[Change]:
    """Divide the processes (`was` in the file) over row groups, copies and shards.

    At most two share rows: the small model has few attention heads. There are two copies if the file has several.
    """
    sizes = _parallelism(values)
    small: dict[str, int] = {}
    if sizes[_TENSOR] > 1:
        least = 2 * min(sizes[_COPIES], 2)
        has_copies = sizes[_TENSOR] < was and processes % 2 == 0
        small[_TENSOR] = 2 if has_copies or engine_in_file(values) is not None else processes
        if engine_in_file(values) is not None and (processes % least or processes < 2 * least):
            raise UserError(
                f"--processes {processes}: FSDP2 shards what {sizes[_TENSOR]} processes of the accelerate file share, "
                f"which needs at least {least} x 2 processes. Write --processes {2 * least}."
            )
    if sizes[_SEQUENCE] > 1:
        small[_SEQUENCE] = 2 if processes % 2 == 0 else 1
    if max(sizes[_COPIES], sizes[_SHARDS]) > 1:
        copies = 2 if sizes[_COPIES] > 1 else 1
        if copies > 1 and (processes < 4 or processes % 2):
            raise UserError(
                f"--processes {processes}: the accelerate file has {sizes[_COPIES]} copies of a model that is sharded "
                f"over {sizes[_SHARDS]} processes, which needs at least 2 x 2 processes. Write --processes 4."
            )
        small |= {_COPIES: copies, _SHARDS: processes // copies // small.get(_SEQUENCE, small.get(_TENSOR, 1))}
    for name, now in small.items():
        yield Change(f"parallelism_config.{name}", sizes[name], now, "processes on this machine")
        values["parallelism_config"][name] = now
