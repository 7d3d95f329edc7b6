"""Requests to stop from outside: signals, and the notice before the preemption of a spot machine.

The training loop reads both between two steps. The notice is from the cloud's metadata service:

aws    IMDSv2: spot/instance-action has a document before the machine is stopped, otherwise 404; 2 minutes' notice
       (docs.aws.amazon.com, "Spot Instance interruption notices")
gcp    instance/preempted is TRUE; 30 seconds (cloud.google.com, "Create and use Spot VMs")
azure  scheduledevents has an event `Preempt` for this machine; at least 30 seconds (learn.microsoft.com, "Scheduled
       Events"). The first response may take minutes, since the first request activates the service.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Literal
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from finetune.errors import FinetuneError
from finetune.runtime import distributed
from finetune.runtime.processes import STOP_SIGNALS

EXIT_CODES = {"signal SIGTERM": 143, "signal SIGINT": 130, "signal SIGHUP": 129}
"""Exit codes as in a shell."""

_INTERRUPTED = b"\nCtrl-C: the run stops after this step and saves a checkpoint. Press Ctrl-C again to exit now.\n"


class ReceivedSignals:
    """The signals that this process has received."""

    def __init__(self, *, interrupts_start: bool = False) -> None:
        self.received: signal.Signals | None = None  # the first stop signal
        self.wants_save = False
        self.interrupts_start = interrupts_start  # raise at once: there is nothing to save yet
        self._num_interrupts = 0
        self._num_piped_interrupts = 0
        self.wants_immediate_exit = False  # after a second SIGINT that the main thread could not handle
        self.wakeup_pipe: int | None = None  # to which the interpreter writes the numbers of signals

    def note(self, number: int, frame: FrameType | None) -> None:
        """Record the signal; a second SIGINT raises KeyboardInterrupt."""
        if number == signal.SIGUSR1:
            self.wants_save = True
            return
        self.received = self.received or signal.Signals(number)
        if self.interrupts_start:
            self.interrupts_start = False
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            self._num_interrupts += 1
            if self._num_interrupts > 1:
                raise KeyboardInterrupt
            if distributed.is_main():
                os.write(2, _INTERRUPTED)  # the signal may have interrupted a `print`

    def read_wakeup_pipe(self) -> None:
        """Record signals that the main thread cannot handle because it is stuck in a collective."""
        if self.wakeup_pipe is None:
            return
        with suppress(BlockingIOError):
            numbers = os.read(self.wakeup_pipe, 1024)
            self._num_piped_interrupts += numbers.count(signal.SIGINT)
            self.wants_immediate_exit = self._num_piped_interrupts > 1
            stopping = [number for number in numbers if number in STOP_SIGNALS]
            if stopping:
                self.received = self.received or signal.Signals(stopping[0])


@contextmanager
def record_signals(*, is_callers_process: bool = False) -> Iterator[ReceivedSignals]:
    """Record signals in this context; outside the main thread raises FinetuneError.

    An ignored SIGHUP stays ignored: a run under `nohup` outlives its terminal. In a caller's process a signal raises
    KeyboardInterrupt until `interrupts_start` is cleared; later ones are returned by `take_received`.
    """
    note = ReceivedSignals(interrupts_start=is_callers_process)
    numbers = [*STOP_SIGNALS, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    try:
        before = {number: signal.signal(number, note.note) for number in numbers}
    except ValueError as error:
        raise FinetuneError("training must run in the main thread, which alone can handle signals") from error
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    note.wakeup_pipe = reading
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # an event loop's, in a notebook
    try:
        yield note
    finally:
        note.wakeup_pipe = None
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        for end in (reading, writing):
            os.close(end)
        if is_callers_process:
            _received.extend([note.received] if note.received else [])


_received: list[signal.Signals] = []


def take_received() -> signal.Signals | None:
    """Return the signal that stopped the last run in a caller's process, once; None where none has."""
    number = _received[0] if _received else None
    _received.clear()
    return number


Cloud = Literal["aws", "gcp", "azure"]

BASE_VARIABLE = "FINETUNE_METADATA_URL"
"""Environment variable that replaces the URL of the cloud's service."""

BASES: Mapping[Cloud, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://metadata.google.internal",
    "azure": "http://169.254.169.254",
}

_EVERY_SECONDS = 5.0
_TIMEOUT_SECONDS = 2.0


class SpotNotice(threading.Thread):
    """Polls the cloud until a notice is given or the process ends."""

    def __init__(self, cloud: Cloud, *, log: Callable[[str], None]) -> None:
        super().__init__(name="spot notice", daemon=True)
        self._poll_cloud = _POLL_FUNCTIONS[cloud]
        self._cloud = cloud
        self._base = os.environ.get(BASE_VARIABLE, BASES[cloud])
        self._log = log
        self._is_given = False
        self._has_warned = False

    def __call__(self) -> bool:
        """Return whether a notice was given."""
        return self._is_given

    def run(self) -> None:
        """Poll every few seconds."""
        while not self.poll():
            time.sleep(_EVERY_SECONDS)

    def poll(self) -> bool:
        """Poll once; a service that does not respond is logged once and polled again."""
        try:
            self._is_given = self._poll_cloud(self._base)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                self._has_warned = True
                self._log(f"warning: run.spot_notice: the metadata service of {self._cloud} does not respond: {error}")
        return self._is_given


def _aws(base: str) -> bool:
    token = _get(f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, method="PUT")
    try:
        _get(f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    except HTTPError as error:
        if error.code != 404:
            raise
        return False
    return True


def _gcp(base: str) -> bool:
    answer = _get(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer.strip().upper() == "TRUE"


def _azure(base: str) -> bool:
    header = {"Metadata": "true"}
    events = json.loads(_get(f"{base}/metadata/scheduledevents?api-version=2020-07-01", header)).get("Events", [])
    if not events:
        return False
    name = _get(f"{base}/metadata/instance/compute/name?api-version=2021-02-01&format=text", header).strip()
    return any(event.get("EventType") == "Preempt" and name in event.get("Resources", ()) for event in events)


def _get(url: str, headers: Mapping[str, str], *, method: str = "GET") -> str:
    """Return the response of the service, bypassing proxies."""
    request = Request(url, headers=dict(headers), method=method)
    with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_SECONDS) as answer:
        return str(answer.read().decode("utf-8"))


_POLL_FUNCTIONS: Mapping[Cloud, Callable[[str], bool]] = {"aws": _aws, "gcp": _gcp, "azure": _azure}
