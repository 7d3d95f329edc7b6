"""A run within a caller's process: all process state that the run changes is restored at its end.

What stays: imported modules, memory that malloc keeps, and a random number generator of CUDA that the run was the
first to use.
"""

import gc
import logging
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import datasets
import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers.utils import logging as transformers_logging

from finetune.config.load import LoadedConfig
from finetune.errors import TrainingError, UserError
from finetune.model.kernels.fused_layers import restored_rotary_functions
from finetune.report.events import Event
from finetune.report.reporter import RunLog
from finetune.run.start import prefetch_checksums, use_expandable_segments
from finetune.run.state.finished import RunResult
from finetune.run.train import train_for_caller
from finetune.runtime import distributed
from finetune.runtime.processes import restored_environment, restored_parent_signal
from finetune.runtime.supervision import signals, status
from finetune.runtime.text.terminal import guarded_output
from finetune.runtime.upstream import restored_child_signal
from finetune.strategy.launch_file import use_launch_file
from finetune.strategy.upstream import reset_deepspeed


def train_in_process(
    loaded: LoadedConfig,
    *,
    reporters: Sequence[Callable[[Event], object]] = (),
    accelerate_file: Path | None = None,
    launch_variables: Mapping[str, str] = MappingProxyType({}),
) -> RunResult:
    """Train the job in this process, one rank of a launch, and return the result on all ranks. Collective.

    `launch_variables` are the ranks, where `srun` or `mpirun` has set none. Everything else is as for `finetune train`;
    errors are raised. Raises UserError for a job with `run.on_end`.
    """
    if loaded.config.run.on_end is not None:
        raise UserError(
            "run.on_end: the command runs when the process of the run ends, and this one goes on after the run. "
            "Start the run in a process of its own: train(job, num_processes=1), or `finetune train`."
        )
    with isolated_run():
        os.environ.update(launch_variables)
        use_expandable_segments()
        checksums = prefetch_checksums(loaded)
        if accelerate_file is not None:
            for sentence in use_launch_file(accelerate_file):
                RunLog(is_main=distributed.is_main())(sentence)
        return train_for_caller(loaded, checksums, reporters=reporters)


@contextmanager
def isolated_run() -> Iterator[None]:
    """Restore all process state that the run changes; a signal that stopped the run is then sent again.

    So Ctrl-C raises KeyboardInterrupt once the checkpoint is saved, and SIGTERM does what it did before. Raises
    UserError in a process that was forked from one that had used CUDA.
    """
    if torch.cuda._is_in_bad_fork():
        raise UserError(
            "this process was forked from one that had used CUDA already, so it cannot use a GPU. Restart the kernel "
            "and use no GPU before the launcher, or call train(job, num_processes=N), which forks nothing."
        )
    try:
        with ExitStack() as stack:
            for restored in _RESTORED:
                stack.enter_context(restored())
            status.num_launches += 1
            try:
                yield
            finally:
                gc.collect()  # the model, while its process groups are open
    except BaseException as error:
        number = signals.take_received()
        if number is not None and not (number == signal.SIGINT and isinstance(error, KeyboardInterrupt)):
            signal.raise_signal(number)
            raise TrainingError(f"the run was stopped by {number.name} before training began.") from error
        raise
    number = signals.take_received()
    if number is not None:
        signal.raise_signal(number)


@contextmanager
def _open_file_limit() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextmanager
def _loggers() -> Iterator[None]:
    """Restore loggers that exist already, and the filters of all; and whether libraries show progress bars."""
    root = logging.root
    before = {
        logger: (logger.level, logger.propagate, logger.disabled, list(logger.handlers), list(logger.filters))
        for logger in (root, *_all_loggers())
    }
    bars = transformers_logging.is_progress_bar_enabled()
    datasets_bars, hub_bars = datasets.are_progress_bars_disabled(), are_progress_bars_disabled()
    try:
        yield
    finally:
        for logger in _all_loggers():
            if logger not in before:
                logger.filters.clear()
        for logger, (level, propagate, disabled, handlers, filters) in before.items():
            logger.setLevel(level)
            logger.propagate, logger.disabled = propagate, disabled
            logger.handlers[:], logger.filters[:] = handlers, filters
        if bars:
            transformers_logging.enable_progress_bar()
        for is_disabled, enable in (
            (datasets_bars, datasets.enable_progress_bars),
            (hub_bars, enable_progress_bars),
        ):
            if not is_disabled:
                enable()


def _all_loggers() -> list[logging.Logger]:
    return [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]


@contextmanager
def _accelerate_state() -> Iterator[None]:
    """Give the run an Accelerate that knows of no other Accelerator, and the caller its own back."""
    states = [PartialState._shared_state, AcceleratorState._shared_state, GradientState._shared_state]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        reset_deepspeed()
        for state, values in zip(states, before, strict=True):
            state.clear()
            state.update(values)


@contextmanager
def _torch_settings() -> Iterator[None]:
    cudnn, cuda = torch.backends.cudnn, cast(Any, torch.backends.cuda)
    flags = cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, threads, dtype = torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.get_default_dtype()
    kernels = {name: getattr(cuda, f"{name}_enabled")() for name in _ATTENTION_KERNELS}
    try:
        with torch.enable_grad():
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = flags
        torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        for name, is_enabled in kernels.items():
            getattr(cuda, f"enable_{name}")(is_enabled)


_ATTENTION_KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


@contextmanager
def _random_states() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's; of CUDA if it was in use already."""
    python, array, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = cast(Any, torch.cuda)
    devices = cuda.get_rng_state_all() if cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(host)
        if devices:
            cuda.set_rng_state_all(devices)
        if cuda.is_initialized():
            cuda.empty_cache()


_RESTORED: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    restored_environment,
    _open_file_limit,
    restored_parent_signal,
    restored_child_signal,
    restored_rotary_functions,
    warnings.catch_warnings,
    _loggers,
    guarded_output,
    _torch_settings,
    _random_states,
    _accelerate_state,
    distributed.restored_groups,
)
"""In the order in which they are entered; the process groups are closed first."""
