"""`/metrics` for Prometheus: the state of the run after its latest events, served by threads of the main process."""

import io
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from finetune.errors import UserError
from finetune.report.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Profiled,
    RunEnded,
    RunStarted,
    StepSkipped,
    StepTaken,
    Warned,
)
from finetune.report.gpu import COLUMNS
from finetune.report.timing import ThroughputMeter
from finetune.runtime.optional import require

STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper edges of the histogram of step times."""

MAX_CLIENTS, CLIENT_SECONDS = 16, 10.0
"""Maximum number of simultaneous connections, and the timeout of each."""

_GAUGES: Mapping[str, str] = {
    "step": "Optimizer steps taken.",
    "num_steps": "Steps of the whole run.",
    "loss": "Loss of the last step, in nats per target.",
    "learning_rate": "Learning rate of the last step.",
    "gradient_norm": "Norm of the gradient of the last step, before clipping.",
    "epoch": "Passes over the training data.",
    "tokens_per_second": "Median over the last steps, all ranks together.",
    "data_wait_ratio": "Share of the last step that the main rank spent waiting for its batches.",
    "memory_bytes": "Peak memory of the main rank.",
    "mfu_ratio": "Model FLOPs utilization of the last step; only where the peak of the GPU is known.",
    "running": "1 while the run trains, 0 when it has ended.",
    **{f"{name}": f"The main rank's GPU: {name.replace('_', ' ')}." for name in COLUMNS},
}
_COUNTERS: Mapping[str, str] = {
    "tokens": "Tokens trained on since this start, padding not counted.",
    "targets": "Targets trained on since this start.",
    "checkpoints": "Checkpoints written since this start.",
    "warnings": "Warnings since this start.",
}
_LABELLED: Mapping[str, tuple[str, str]] = {
    "evaluation": ("metric", "Metrics of the last evaluation."),
    "step_metric": ("metric", "Metrics that the task logs with each step."),
    "profile_seconds": ("phase", "Time of a profiled step by phase, of the main rank."),
}


class PrometheusReporter:
    """Serves `/metrics` from the start of the run to its end."""

    def __init__(self, port: int, *, address: str, name: str, world: int) -> None:
        """`name` and `world` are labels of `finetune_run_info`. Nothing is served before the first event."""
        self._client = require_client()
        self._place = (port, address)
        self._labels = {"name": name, "world": str(world)}
        self._registry = self._client.CollectorRegistry()
        given: dict[str, Any] = {"namespace": "finetune", "registry": self._registry}
        self._gauges: dict[str, Any] = {}  # only those with a known value
        self._counters = {key: self._client.Counter(key, text, **given) for key, text in _COUNTERS.items()}
        self._labelled = {
            key: self._client.Gauge(key, text, [label], **given) for key, (label, text) in _LABELLED.items()
        }
        self._skipped = self._client.Counter("skipped_steps", "Steps without an update.", ["reason"], **given)
        self._seconds = self._client.Histogram("step_seconds", "Time of a step.", buckets=STEP_SECONDS, **given)
        self._given = given
        self._saved_at: float | None = None
        self._info = self._client.Info("run", "The run that is served here.", **given)
        self._server: Any = None
        self._meter = ThroughputMeter(0)
        self._flops: tuple[float, float] | None = None

    def __call__(self, event: Event) -> None:
        """Update the metrics; raises UserError if the port cannot be served."""
        match event:
            case RunStarted():
                self._start(event)
            case StepTaken():
                self._take_step(event)
            case StepSkipped():
                self._skipped.labels(event.reason).inc()
            case Evaluated():
                self._set_labelled("evaluation", event.metrics)
            case Profiled():
                per_step = {phase: seconds / event.num_steps for phase, seconds in event.seconds.items()}
                self._set_labelled("profile_seconds", per_step)
            case CheckpointSaved():
                self._counters["checkpoints"].inc()
                if self._saved_at is None:  # no checkpoint yet
                    age = self._client.Gauge("last_checkpoint_age_seconds", "Since the last checkpoint.", **self._given)
                    age.set_function(lambda: time.time() - (self._saved_at or 0.0))
                self._saved_at = time.time()
            case Warned():
                self._counters["warnings"].inc()
            case RunEnded():
                self._set({"running": 0})

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def _start(self, event: RunStarted) -> None:
        self._info.info(self._labels | {"strategy": event.strategy.split()[0]})
        self._set({"num_steps": event.num_steps, "step": event.step, "running": 1})
        self._meter = ThroughputMeter(event.num_steps)
        if event.flops_per_token and event.peak_flops_per_second:
            self._flops = event.flops_per_token, event.peak_flops_per_second
        port, address = self._place
        try:
            server = _Server(address, port)
        except OSError as error:
            raise UserError(
                f"report.prometheus: port {port} of {address} cannot be served: {error.strerror}. Another run may "
                "use the same port: give each run its own port."
            ) from error
        server.set_app(self._client.make_wsgi_app(self._registry))
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self._server = server, thread

    def _take_step(self, event: StepTaken) -> None:
        self._meter.add(event)
        values = {
            "step": event.step,
            "loss": event.loss,
            "learning_rate": event.learning_rate,
            "gradient_norm": event.gradient_norm,
            "tokens_per_second": self._meter.tokens_per_second,
            "data_wait_ratio": event.data_share,
            "memory_bytes": event.memory_bytes,
            **({} if event.epoch is None else {"epoch": event.epoch}),
            **event.device,
        }
        if self._flops is not None and event.seconds > 0:
            per_token, peak = self._flops
            values["mfu_ratio"] = event.num_tokens * per_token / event.seconds / peak
        self._set(values)
        for name in COLUMNS:
            if name not in event.device and name in self._gauges:  # the GPU fell off the bus
                self._registry.unregister(self._gauges.pop(name))
        self._counters["tokens"].inc(event.num_tokens)
        self._counters["targets"].inc(event.num_targets)
        self._seconds.observe(event.seconds)
        self._set_labelled("step_metric", event.metrics)

    def _set(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = self._client.Gauge(name, _GAUGES[name], **self._given)
            self._gauges[name].set(value)

    def _set_labelled(self, name: str, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            self._labelled[name].labels(label).set(value)


class _Handler(WSGIRequestHandler):
    """A handler that never writes to the run's log."""

    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""

    def get_stderr(self) -> io.StringIO:
        """Return a buffer for tracebacks of clients that disconnect early."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """Disconnects slow or excess clients, which would use up the file descriptors that checkpoints need."""

    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, socket_address = addresses[0]
        self._clients: dict[socket.socket, float] = {}  # deadlines, by time.monotonic()
        super().__init__(socket_address[:2], _Handler)  # type: ignore[arg-type]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether another client is accepted, and set its deadline."""
        has_room = len(self._clients) < MAX_CLIENTS
        if has_room:
            self._clients[request] = time.monotonic() + CLIENT_SECONDS
        return has_room

    def service_actions(self) -> None:
        """Disconnect clients after their deadline, such as one that sends a byte now and then."""
        for request, until in list(self._clients.items()):
            if until < time.monotonic():
                with suppress(OSError):  # already disconnected
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close the connection of a client."""
        self._clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of disconnected clients."""


def require_client() -> Any:
    """Return prometheus_client; raises MissingPackage if it is not installed."""
    return require("prometheus_client", extra="monitoring", purpose="report.prometheus")
