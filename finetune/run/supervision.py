"""Supervision of a run from its start to its exit code: one writer, one status file, one first error, no orphans."""

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from finetune.config.load import LoadedConfig
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import FinetuneError, ModelError, UserError, refused_exits
from finetune.memory.limits import is_out_of_memory
from finetune.report.reporter import RunLog
from finetune.report.timing import StartupTimer
from finetune.run.state.finished import FinishedRun
from finetune.runtime import distributed
from finetune.runtime.processes import stop_with_launcher
from finetune.runtime.resources import disk_errors, raise_file_limit
from finetune.runtime.run_folder import lock_run_folder, require_newest_attempt
from finetune.runtime.supervision import signals, status
from finetune.runtime.supervision.exit import (
    ProcessExit,
    RaisedExit,
    gather_peers,
    is_broken_collective,
    kill_children,
)
from finetune.runtime.supervision.on_end import EndCommand
from finetune.runtime.supervision.signals import ReceivedSignals, record_signals
from finetune.runtime.supervision.status import StatusFile, exit_from_error, open_status_file
from finetune.runtime.supervision.watchdog import Watchdog, keep_previous_reports, running_watchdog
from finetune.train.stopping import FAILED_SAVE, FINAL_REASONS, SPOT_NOTICE

EXIT_CODES = {**signals.EXIT_CODES, SPOT_NOTICE: 143, FAILED_SAVE: 1}
"""Every other end is a success; a machine that is reclaimed is to be replaced, as after SIGTERM."""

_MODEL_CODE = ("/transformers/models/", "/transformers_modules/")
_NOT_THE_MODEL = ("/finetune/", "/torch/distributed/", "/torch/_dynamo/", "/torch/_inductor/", "/deepspeed/")
"""Code that a model's code may call, whose errors are not the model's."""


@dataclass(frozen=True)
class Supervision:
    """The signals, the status file, the exit, the watchdog and the stopwatch of one process of a run."""

    signals: ReceivedSignals
    status: StatusFile
    process_exit: ProcessExit
    watchdog: Watchdog
    startup: StartupTimer
    folders: Sequence[Path]  # that the run writes to
    on_end: EndCommand

    def gather_peers(self) -> None:
        """Exchange process ids so that a crashed rank can be named. Collective."""
        self.process_exit.peers = gather_peers()
        self.status.add({"ranks": list(map(asdict, self.process_exit.peers))})

    def begin_training(self) -> None:
        """Leave stop signals to the loop from now on; a failure counts as a failure of training."""
        self.signals.interrupts_start = False
        self.watchdog.begin_training()

    def end(self, reason: str) -> int:
        """Write the end of the run to the status file and return its exit code."""
        code = EXIT_CODES.get(reason, 0)
        state = status.FINISHED if reason in FINAL_REASONS else status.STOPPED
        self.status.end(state, reason=reason, exit_code=code)
        return code

    def end_finished(self, finished: FinishedRun, *, num_steps: int) -> int:
        """Report that there is nothing left to do, and return the exit code of a success."""
        self.on_end.call_off()  # who starts a finished run may want to look at it
        self.status.checkpoint(str(finished.checkpoint))
        self.status.run(finished.progress, num_steps=num_steps)
        return self.end(finished.reason)

    @contextmanager
    def recording_first_error(self, refusal: type[FinetuneError] = UserError) -> Iterator[None]:
        """Write an error that leaves the context to the status file before anything is cleaned up.

        An error of the disk becomes the `refusal`.
        """
        try:
            with disk_errors(self.folders, refusal):
                yield
        except BaseException as error:
            if not is_broken_collective(error):  # another rank has the cause
                self.status.claim_exit(
                    self.watchdog.stop_before_training() or exit_from_error(error, rank=distributed.rank())
                )
            raise


@contextmanager
def model_code_errors() -> Iterator[None]:
    """Raise ModelError for an exception from the model's own code: it does not accept the inputs of this job.

    A device error, one out of memory, of another rank or of ours, is raised as it is.
    """
    try:
        yield
    except (FinetuneError, OSError, torch.AcceleratorError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        paths = [Path(frame.filename).as_posix().rpartition("/site-packages")[2] for frame in frames]
        last = max((at for at, path in enumerate(paths) if any(part in path for part in _MODEL_CODE)), default=None)
        is_other = last is None or any(part in path for path in paths[last:] for part in _NOT_THE_MODEL)
        if last is None or is_other or is_out_of_memory(error) or "CUDA" in str(error):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise ModelError(
            f"the model's own code cannot compute this job: {type(error).__name__}: {lines[0][:300]} "
            f"({Path(paths[last]).name}, line {frames[last].lineno}). It may not support the task, or may need another "
            "tokenizer or other values in its config."
        ) from error


@contextmanager
def supervised_run(
    loaded: LoadedConfig, startup: StartupTimer, *, log: RunLog, outlives_run: bool = False
) -> Iterator[Supervision]:
    """Supervise this process; rank 0 locks the run folder.

    One of several processes that meets an error exits here, with all others, and shows the first error of all; so does
    a single process with a command of `run.on_end`; any other one lets its error pass. Where the process
    `outlives_run`, each rank raises the first error of all.
    Raises UserError where another run writes to the folder, or where the disk of the folder or of the cache is full.
    """
    config, rank, folder = loaded.config, distributed.rank(), Path(loaded.config.run.folder)
    others = multiprocessing.active_children()
    with (
        record_signals(is_callers_process=outlives_run) as received,
        lock_run_folder(folder, log=log) if rank == 0 else nullcontext(),
    ):
        stop_with_launcher()
        if (warning := raise_file_limit(distributed.world())) is not None:
            log(f"warning: {warning}")
        if rank == 0:
            require_newest_attempt()
            keep_previous_reports(folder)
        file = open_status_file(folder, rank=rank)
        file.start()
        command = config.run.on_end if rank == 0 else None
        on_end = EndCommand(command, file, folder=folder, url=loaded.remote or "")
        if outlives_run:
            leave: ProcessExit = RaisedExit(file, rank=rank, world=distributed.world())
        else:
            leave = ProcessExit(file, rank=rank, before_exit=on_end.run)
        watchdog = Watchdog(folder, status=file, ending=leave, note=received, rank=rank, world=distributed.world())
        folders = (folder, cache_folder(config.data))
        supervision = Supervision(received, file, leave, watchdog, startup, folders=folders, on_end=on_end)
        try:
            with running_watchdog(watchdog), supervision.recording_first_error(), refused_exits():
                yield supervision
        except BaseException as error:
            if stop := watchdog.stop_before_training():  # a signal may have interrupted any line above
                leave.after(stop)
            if distributed.world() > 1 or outlives_run or command is not None:
                leave.exit_after_error(error)
            raise
        finally:
            kill_children(spared=others)
