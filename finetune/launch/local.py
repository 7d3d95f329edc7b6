"""Several ranks on this host without a launcher's command: torch's elastic launcher starts and watches them.

It is the part of torchrun that starts processes on one host (`torch.distributed.elastic.multiprocessing`). Each rank is
a fresh interpreter, never a fork. The launcher's own log and traceback are left out: ranks report their errors.
"""

import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from finetune.launch.ranks import LOCALHOST, OWN_RUN_ID, TORCHRUN_DEFAULTS, Ranks, free_port
from finetune.runtime.optional import lazily

with lazily():  # torch
    from torch.distributed.elastic.multiprocessing import api as elastic

STOP_SECONDS = 180
"""Time for ranks to save and end after a signal; TORCH_ELASTIC_SHUTDOWN_TIMEOUT counts if it is set."""

_HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_SECONDS = 0.1


def run_ranks(arguments: Sequence[str], *, num_processes: int) -> int:
    """Run `python WORDS` on this number of ranks of this host, and return how they ended as an exit code.

    It is 0, the code of the rank that failed first, or 128 + N for a rank that signal N has killed. In the main thread
    signals are passed on to all ranks: SIGTERM, SIGINT and SIGHUP, after which they save and end, and SIGUSR1. The
    handlers of the caller are restored. If this process dies, the ranks save and end. Their output goes to the standard
    streams of this process.
    """
    run_id, port = f"{OWN_RUN_ID}{uuid.uuid4().hex}", free_port()
    variables = {
        rank: {
            **{name: os.environ.get(name, value) for name, value in TORCHRUN_DEFAULTS.items()},
            **Ranks(rank, num_processes, rank, num_processes, LOCALHOST, port, "finetune").variables(),
            **{"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        }
        for rank in range(num_processes)
    }
    ranks = elastic.SubprocessContext(
        name="finetune",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(num_processes), tuple(arguments)),
        envs=variables,
        logs_specs=elastic.DefaultLogsSpecs(log_dir=os.devnull),
    )
    with _restored_settings():
        return _exit_code(_wait(ranks))


def _wait(ranks: Any) -> Any:
    """Start the ranks and return their result; the first signal that asks to stop ends the wait for live ranks."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        """Pass SIGUSR1 on, and every further request to stop: the first is passed on by `close`."""
        if number != signal.SIGUSR1:
            received.append(number)
        if number == signal.SIGUSR1 or len(received) > 1:
            for pid in ranks.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS))
    try:
        ranks.start()
        if threading.current_thread() is threading.main_thread():
            for number in (*_handled_signals(), signal.SIGUSR1):
                signal.signal(number, forward)
        result = None
        while result is None:
            if received:
                ranks.close(signal.Signals(received[0]), timeout=seconds)
            result = ranks.wait(timeout=_POLL_SECONDS, period=_POLL_SECONDS)
    except BaseException:
        ranks.close(signal.SIGKILL)
        raise
    return result


def _exit_code(result: Any) -> int:
    failures = list(result.failures.values())  # in the order in which they were seen
    if not failures:
        return 0
    first = failures[0]
    if first.exitcode == -signal.SIGKILL:
        print(f"error: rank {first.local_rank} (pid {first.pid}) was killed (SIGKILL).", file=sys.stderr, flush=True)
    return int(first.exitcode) if first.exitcode >= 0 else 128 - int(first.exitcode)


def _handled_signals() -> list[signal.Signals]:
    """Return the signals that stop ranks; one that is ignored stays ignored, as SIGHUP is under `nohup`."""
    return [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def _restored_settings() -> Iterator[None]:
    """Restore the signal handlers at the end, and silence torch's launcher and name its signals until then."""
    before = {number: signal.getsignal(number) for number in (*_STOP_SIGNALS, signal.SIGUSR1)}
    variable = os.environ.get(_HANDLED)
    os.environ[_HANDLED] = ",".join(number.name for number in _handled_signals())
    silence = logging.Filter("finetune")  # of loggers by their names, which torch's has not
    elastic.logger.addFilter(silence)
    try:
        yield
    finally:
        elastic.logger.removeFilter(silence)
        os.environ.pop(_HANDLED)
        if variable is not None:
            os.environ[_HANDLED] = variable
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
