"""`/metrics` for Prometheus: the state of the run after its latest events, served by threads of the main process."""

import time
from collections.abc import Mapping
from typing import Any

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
    "last_checkpoint_age_seconds": "Since the last checkpoint of this start.",
    "running": "1 while the run trains, 0 when it has ended.",
    **{name: f"The main rank's GPU: {name.replace('_', ' ')}." for name in COLUMNS},
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
        self._port, self._address = port, address
        self._labels = {"name": name, "world": str(world)}
        self._given = {"namespace": "finetune", "registry": self._client.CollectorRegistry()}
        self._gauges: dict[str, Any] = {}  # only those with a known value
        self._counters = {key: self._client.Counter(key, text, **self._given) for key, text in _COUNTERS.items()}
        self._labelled = {
            key: self._client.Gauge(key, text, [label], **self._given) for key, (label, text) in _LABELLED.items()
        }
        self._skipped = self._client.Counter("skipped_steps", "Steps without an update.", ["reason"], **self._given)
        self._seconds = self._client.Histogram("step_seconds", "Time of a step.", buckets=STEP_SECONDS, **self._given)
        self._info = self._client.Info("run", "The run that is served here.", **self._given)
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
                saved_at = time.time()
                self._gauge("last_checkpoint_age_seconds").set_function(lambda: time.time() - saved_at)
            case Warned():
                self._counters["warnings"].inc()
            case RunEnded():
                self._gauge("running").set(0)

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
        for name, value in (("num_steps", event.num_steps), ("step", event.step), ("running", 1)):
            self._gauge(name).set(value)
        self._meter = ThroughputMeter(event.num_steps)
        if event.flops_per_token and event.peak_flops_per_second:
            self._flops = event.flops_per_token, event.peak_flops_per_second
        try:
            self._server = self._client.start_http_server(self._port, self._address, self._given["registry"])
        except OSError as error:
            raise UserError(
                f"report.prometheus: port {self._port} of {self._address} cannot be served: {error.strerror}. Another "
                "run may use the same port: give each run its own port."
            ) from error

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
        for name, value in values.items():
            self._gauge(name).set(value)
        for name in (set(COLUMNS) & self._gauges.keys()) - event.device.keys():  # the GPU fell off the bus
            self._given["registry"].unregister(self._gauges.pop(name))
        self._counters["tokens"].inc(event.num_tokens)
        self._counters["targets"].inc(event.num_targets)
        self._seconds.observe(event.seconds)
        self._set_labelled("step_metric", event.metrics)

    def _gauge(self, name: str) -> Any:
        """Return the gauge, which is served from its first use on."""
        if name not in self._gauges:
            self._gauges[name] = self._client.Gauge(name, _GAUGES[name], **self._given)
        return self._gauges[name]

    def _set_labelled(self, name: str, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            self._labelled[name].labels(label).set(value)


def require_client() -> Any:
    """Return prometheus_client; raises MissingPackage if it is not installed."""
    return require("prometheus_client", extra="monitoring", purpose="report.prometheus")
