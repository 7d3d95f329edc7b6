"""The start of `finetune train` before torch is imported: an answer from the run folder, checksums, the allocator.

The answer is that the run is finished, or that it cannot be resumed. Whatever is not clear from the folder is left to
the start itself: damaged files, a URL, anything that depends on the data.
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from finetune import __version__
from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import RunFingerprint, read_manifest_of_step
from finetune.checkpoint.read.changes import check_changes, refuse_existing_checkpoint, setting_differences
from finetune.config.load import LoadedConfig, load_config
from finetune.config.paths import is_url
from finetune.config.resume_keys import COMPARED_BY_CONTENT, keys_that_may_differ, keys_that_must_match
from finetune.config.run_config import RunConfig
from finetune.errors import CheckpointError
from finetune.report.reporter import RunLog
from finetune.run.state.finished import (
    are_inputs_unchanged,
    format_finished,
    input_stamps,
    is_complete,
    read_final_record,
    read_finished_run,
)
from finetune.runtime.optional import lazily
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, lock_run_folder
from finetune.runtime.supervision.status import exit_from_error, open_status_file, record_finished

with lazily():  # numpy
    from finetune.checkpoint.read import checksum_prefetch

with lazily(freeze=True):  # torch
    from finetune.run import train
    from finetune.strategy import launch_file


def start(path: Path, overrides: Sequence[str], *, accelerate_file: Path | None = None) -> int:
    """Train the job, distributed as the accelerate file says if one is given, and return the exit code.

    The checksums of the checkpoint that the run will resume from are computed while torch is being imported.
    """
    loaded = load_config(path, overrides)
    code = preflight(loaded)
    if code is not None:
        return code
    use_expandable_segments()
    checksums = prefetch_checksums(loaded)
    if accelerate_file is not None:
        for sentence in launch_file.use_launch_file(accelerate_file):
            RunLog(is_main=os.environ.get("RANK", "0") == "0")(sentence)
    return train.train_from_config(loaded, checksums)


def preflight(loaded: LoadedConfig) -> int | None:
    """Return the exit code of a finished run; None where the start has to decide.

    Raises CheckpointError, on every rank alike, where the start would refuse to continue. Not collective.
    """
    config, rank = loaded.config, int(os.environ.get("RANK", "0"))
    folder = Path(config.run.folder)
    if (
        is_url(config.run.folder)
        or not folder.is_dir()
        or layout.newest_checkpoint(folder / CHECKPOINTS_FOLDER) is None
    ):
        return None
    with lock_run_folder(folder, log=print) if rank == 0 else nullcontext():
        try:
            _refuse_changes(config)
            return _finished(config, rank=rank)
        except CheckpointError as error:
            if rank == 0:
                status = open_status_file(folder, rank=rank)
                status.start()
                status.claim_exit(exit_from_error(error, rank=rank))
            raise


def _refuse_changes(config: RunConfig) -> None:
    """Raise CheckpointError where the checkpoint is of a run with other maths, or none may be continued."""
    newest = layout.newest_checkpoint(Path(config.run.folder) / CHECKPOINTS_FOLDER)
    resume = config.checkpoint.resume
    if resume == "never":
        refuse_existing_checkpoint(newest)
    path = newest if resume == "auto" else Path(resume)
    if path is None or is_url(resume):
        return
    try:
        manifest = read_manifest_of_step(path)
        if not is_complete(path, manifest):
            return
    except (CheckpointError, OSError):
        return
    current = _facts_from_config(config, manifest.run)
    if current is not None and are_inputs_unchanged(config, since=manifest.created):  # else there may be more to report
        check_changes(path, manifest.run, current=current, allowed=config.checkpoint.allow_changes)


def _facts_from_config(config: RunConfig, saved: RunFingerprint) -> RunFingerprint | None:
    """Return the fingerprint if data, tokenizer and frozen weights are unchanged; None where their keys differ."""
    maths, settings = keys_that_must_match(config), keys_that_may_differ(config)
    if any(name in COMPARED_BY_CONTENT for name in setting_differences(saved.settings, settings)):
        return None
    contents = {name: digest for name, digest in saved.identity.items() if "." not in name and name not in maths}
    return RunFingerprint({**maths, **contents}, settings, saved.origin)


def _finished(config: RunConfig, *, rank: int) -> int | None:
    """Return 0 for a finished run whose packages and input files are unchanged, and log it; None otherwise."""
    num_steps = config.train.steps
    # Processes of several machines may see different files, and must not disagree on whether the run is over.
    is_distributed = os.environ.get("WORLD_SIZE", "1") != os.environ.get("LOCAL_WORLD_SIZE", "1")
    if num_steps is None or config.export.push_to_hub is not None or is_distributed:
        return None
    finished_run = read_finished_run(config, num_steps=num_steps)
    if finished_run is None:
        return None
    finished, manifest = finished_run
    current = _facts_from_config(config, manifest.run)
    try:
        record = read_final_record(Path(config.run.folder)) or {}
        stamps = input_stamps(config, before=float("inf"))
        packages = {name: __version__ if name == "finetune" else version(name) for name in manifest.versions}
    except (OSError, ValueError, PackageNotFoundError):
        return None
    is_unchanged = stamps is not None and record.get("inputs") == stamps and packages == dict(manifest.versions)
    if current is None or not is_unchanged:
        return None
    sentences = format_finished(config, finished, manifest.run, current=current)
    if sentences is None:
        return None
    log = RunLog(is_main=rank == 0)
    for sentence in sentences:
        log(sentence)
    status = open_status_file(Path(config.run.folder), rank=rank)
    status.start()
    return record_finished(status, finished.progress, str(finished.checkpoint), finished.reason, num_steps=num_steps)


def prefetch_checksums(loaded: LoadedConfig) -> "checksum_prefetch.ChecksumPrefetch | None":
    """Start to compute the checksums that the run will verify; None for a run at a URL, which is downloaded first."""
    config = loaded.config
    if is_url(config.run.folder):
        return None
    folder = Path(config.run.folder) / CHECKPOINTS_FOLDER
    return checksum_prefetch.start_checksum_prefetch(folder, resume=config.checkpoint.resume)


# Rows differ in length from step to step, so blocks of ever new sizes are asked for. With expandable segments a block
# grows in place, where torch would else keep blocks that fit nothing and fail with memory to spare
# (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"

_NAMES = (
    ALLOC_CONF,
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",  # registers segments, which must not grow then
)
"""Variables with which a user sets up the allocator, or settings that need another allocator."""

_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def use_expandable_segments(variables: MutableMapping[str, str] = os.environ) -> bool:
    """Have torch use expandable segments where every GPU supports them and the user has not set up the allocator.

    Returns whether that was done; not where torch uses a GPU already. The run's `environment.json` has the variable,
    with all others of torch. Nothing here hands tensors of a GPU to another process or records CUDA graphs.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    if any(name in variables for name in _NAMES) or not has_virtual_memory():
        return False
    variables[ALLOC_CONF] = EXPANDABLE
    return True


def has_virtual_memory() -> bool:
    """Return whether there are NVIDIA GPUs and all can map memory: virtual ones of some clouds cannot."""
    try:
        driver = ctypes.CDLL("libcuda.so.1") if sys.platform == "linux" else None
    except OSError:
        return False
    number, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver is None or driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return False
    return number.value > 0 and all(
        driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, device) == 0
        and value.value == 1
        for index in range(number.value)
    )
