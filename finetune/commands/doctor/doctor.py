"""`finetune doctor`: what this machine has, and what must be fixed before a run."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from finetune.commands.printing import print_facts
from finetune.config.load import load_config
from finetune.data.token_cache.cache import DEFAULT_FOLDER, cache_folder
from finetune.runtime.environment import environment_facts
from finetune.runtime.resources import file_limit, files_needed, format_size, usable_cores
from finetune.runtime.upstream import ABANDONED, BUILDING, BuildLock, build_locks, extensions_folder
from finetune.strategy.cpu_adam import missing_for_cpu_adam

FULL_BYTES = 1_000_000_000
"""Free room below which a disk counts as full."""

SMALL_SHARED_BYTES = 1_000_000_000
"""Shared memory below which loader processes may fail to hand over their batches; a container's default is 64 MB."""

SHARED_MEMORY = Path("/dev/shm")
_MANY_PROCESSES = 1000

DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """Something to know, or something that must be mended."""

    text: str
    must_be_fixed: bool


def examine(path: Path | None, overrides: Sequence[str]) -> bool:
    """Print what the machine has and what is found; return whether a run can begin.

    With a job, its own cache and run folder are looked at. Raises ConfigError where the job is not right.
    """
    config = load_config(path, overrides).config if path else None
    places = {
        "cache": cache_folder(config.data) if config else Path(DEFAULT_FOLDER).expanduser(),
        "run": Path(config.run.folder) if config else Path.cwd(),
    }
    facts = environment_facts()
    print_facts(_machine_facts(facts, places))
    locks = build_locks(extensions_folder())
    findings = list(find_problems(facts, places, locks=locks, has_deepspeed=find_spec("deepspeed") is not None))
    print()
    for finding in findings:
        print(f"{'FIX' if finding.must_be_fixed else 'note'}: {finding.text}")
    if not findings:
        print("nothing to fix")
    return not any(finding.must_be_fixed for finding in findings)


def find_problems(
    facts: dict[str, Any], places: dict[str, Path], *, locks: Sequence[BuildLock], has_deepspeed: bool = False
) -> Iterator[Finding]:
    """Yield what there is to know of the machine."""
    for lock in locks:
        advice = " A launch under DeepSpeed removes it; or delete it." if lock.state == ABANDONED else ""
        yield Finding(f"{lock}{advice}", lock.state != BUILDING)
    for name, place in places.items():
        if (free := _free_bytes(place)) < FULL_BYTES:
            yield Finding(f"the disk of the {name} folder {place} has {format_size(free)} left. Make room.", True)
    if DRIVER.exists() and not torch.accelerator.is_available():
        yield Finding(
            f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU. Install a build of torch for it, "
            "or look whether CUDA_VISIBLE_DEVICES is empty.",
            True,
        )
    if SHARED_MEMORY.is_dir() and (shared := shutil.disk_usage(SHARED_MEMORY).total) < SMALL_SHARED_BYTES:
        yield Finding(
            f"{SHARED_MEMORY} has only {format_size(shared)}: loader processes hand batches over through it. Start the "
            "container with more (docker: --shm-size=8g), or write data.num_workers: 0.",
            False,
        )
    if (limit := file_limit()).hard < files_needed(_MANY_PROCESSES):
        yield Finding(
            f"a process may have {limit.hard:,} files and sockets open (`ulimit -Hn`): a run of many processes needs 3 "
            f"for each, {files_needed(_MANY_PROCESSES):,} for {_MANY_PROCESSES:,}. Raise the hard limit for those.",
            False,
        )
    if has_deepspeed and (missing := missing_for_cpu_adam()):
        yield Finding(f"ZeRO with an offloaded optimizer (zero2_offload, zero3_offload) cannot start: {missing}", False)
    default = facts["accelerate_default_config"]
    if default["exists"]:
        yield Finding(f"`accelerate launch` without --config_file takes {default['path']}: name a file.", False)


def _machine_facts(facts: dict[str, Any], places: dict[str, Path]) -> Iterator[tuple[str, str]]:
    yield "python", facts["python"]
    yield "packages", ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    yield "devices", ", ".join(_device(each) for each in facts["devices"])
    yield "cores", f"{usable_cores()} may be used of {facts['num_cpus']}"
    memory = psutil.virtual_memory()
    yield "memory", f"{format_size(memory.available)} free of {format_size(memory.total)}"
    limit = file_limit()
    yield "open files", f"{limit.soft:,}, which a run raises up to {limit.hard:,} where it needs more"
    for name, place in places.items():
        yield f"{name} folder", f"{place}, {format_size(_free_bytes(place))} free"


def _device(device: dict[str, Any]) -> str:
    return f"{device['name']} ({format_size(device['memory_bytes'])})" if "memory_bytes" in device else device["name"]


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(next(each for each in (place, *place.parents) if each.exists())).free
