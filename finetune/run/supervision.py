"""Supervision of a run from its first moment: one writer, one status file, one first error, no process left over."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import FinetuneError, UserError
from finetune.report.run_log import RunLog
from finetune.runtime import distributed
from finetune.runtime.processes import stop_with_launcher
from finetune.runtime.resources import disk_errors
from finetune.runtime.supervision import hang
from finetune.runtime.supervision.exit import ProcessExit, gather_peers, is_broken_collective, kill_children
from finetune.runtime.supervision.signals import ReceivedSignals, record_signals
from finetune.runtime.supervision.status import StatusFile, exit_from_error, open_status_file
from finetune.runtime.supervision.watchdog import Watchdog, running_watchdog
from finetune.runtime.supervision.writer_lock import lock_run_folder


@dataclass(frozen=True)
class Supervision:
    """What keeps an eye on one process of a run."""

    note: ReceivedSignals
    status: StatusFile
    ending: ProcessExit
    watchdog: Watchdog
    places: Sequence[Path]  # where the run writes

    def meet(self) -> None:
        """Learn who belongs to the run, so that one that vanishes can be named. Collective."""
        self.ending.peers = gather_peers()
        self.status.met(self.ending.peers)

    @contextmanager
    def recording_first_error(self, refusal: type[FinetuneError] = UserError) -> Iterator[None]:
        """Have an error that leaves the context in the status file before anything is cleared up.

        What a disk refuses to take becomes the `refusal`.
        """
        try:
            with disk_errors(self.places, refusal):
                yield
        except BaseException as error:
            if not is_broken_collective(error):  # that is for another rank to explain
                self.status.claim_exit(
                    self.watchdog.stop_before_training() or exit_from_error(error, rank=distributed.rank())
                )
            raise


@contextmanager
def supervised_run(folder: Path, *, log: RunLog, also: Sequence[Path] = ()) -> Iterator[Supervision]:
    """Watch this process while the context lasts; rank 0 claims the folder for the run.

    One of several processes that meets an error ends here, with every other, and shows the first error of them all;
    a process alone lets its error pass. Raises UserError where another run writes into the folder, or where the disk of
    the folder, or of those that are written `also`, takes nothing.
    """
    rank = distributed.rank()
    with record_signals() as note, lock_run_folder(folder, log=log) if rank == 0 else nullcontext():
        stop_with_launcher()
        if rank == 0:
            hang.keep_previous_reports(folder)
        status = open_status_file(folder, rank=rank)
        status.start()
        ending = ProcessExit(status, rank=rank)
        watchdog = Watchdog(folder, status=status, ending=ending, note=note, rank=rank, world=distributed.world())
        watch = Supervision(note, status, ending, watchdog, (folder, *also))
        try:
            with running_watchdog(watchdog), watch.recording_first_error():
                yield watch
        except BaseException as error:
            if stop := watchdog.stop_before_training():  # whatever a signal broke on its way
                ending.after(stop)
            if distributed.world() > 1:
                ending.exit_after_error(error)
            raise
        finally:
            kill_children()
