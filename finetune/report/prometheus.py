"""`/metrics` for Prometheus: the state of the run after its latest events, served by threads of the main process."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from finetune.errors import UserError
from finetune.report.events import (
    CheckpointSaved,
    Evaluated,
    Event,
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


class PrometheusReporter:
    """Serves `/metrics` from the start of the run to its end; a gauge without a known value is not served."""

    def __init__(self, port: int, *, address: str, name: str, world: int) -> None:
        """`name` and `world` are labels of `finetune_run_info`. Nothing is served before the first event."""
        self._client = require_client()
        self._port, self._address = port, address
        self._labels = {"name": name, "world": str(world)}
        self._registry = self._client.CollectorRegistry()
        self._registry.register(self)
        shared = {"namespace": "finetune", "registry": self._registry}
        self._counters = {key: self._client.Counter(key, text, **shared) for key, text in _COUNTERS.items()}
        self._skipped = self._client.Counter("skipped_steps", "Steps without an update.", ["reason"], **shared)
        self._seconds = self._client.Histogram("step_seconds", "Time of a step.", buckets=STEP_SECONDS, **shared)
        self._evaluation = self._client.Gauge("evaluation", "Metrics of the last evaluation.", ["metric"], **shared)
        self._metrics = self._client.Gauge("step_metric", "Metrics of the task at each step.", ["metric"], **shared)
        self._info = self._client.Info("run", "The run that is served here.", **shared)
        self._run_gauges: Mapping[str, float] = {}
        self._step_gauges: Mapping[str, float] = {}
        self._saved_at: float | None = None
        self._server: Any = None
        self._meter = ThroughputMeter(0)
        self._flops: tuple[float, float] | None = None

    def collect(self) -> Iterator[Any]:
        """Yield the gauges; the client calls this in its own thread for each request."""
        values = {**self._run_gauges, **self._step_gauges}
        if self._saved_at is not None:
            values["last_checkpoint_age_seconds"] = time.time() - self._saved_at
        for name, value in values.items():
            yield self._client.metrics_core.GaugeMetricFamily(f"finetune_{name}", _GAUGES[name], value=value)

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
                for metric, value in event.metrics.items():
                    self._evaluation.labels(metric).set(value)
            case CheckpointSaved():
                self._counters["checkpoints"].inc()
                self._saved_at = time.time()
            case Warned():
                self._counters["warnings"].inc()
            case RunEnded():
                self._run_gauges = {**self._run_gauges, "running": 0}

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
        self._run_gauges = {"num_steps": event.num_steps, "step": event.step, "running": 1}
        self._meter = ThroughputMeter(event.num_steps)
        if event.flops_per_token and event.peak_flops_per_second:
            self._flops = event.flops_per_token, event.peak_flops_per_second
        try:
            self._server = self._client.start_http_server(self._port, self._address, self._registry)
        except OSError as error:
            raise UserError(
                f"report.prometheus: port {self._port} of {self._address} cannot be served: {error.strerror}. Another "
                "run may use the same port: give each run its own port."
            ) from error

    def _take_step(self, event: StepTaken) -> None:
        self._meter.add(event)
        gauges = {
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
            gauges["mfu_ratio"] = event.num_tokens * per_token / event.seconds / peak
        self._step_gauges = gauges
        self._counters["tokens"].inc(event.num_tokens)
        self._counters["targets"].inc(event.num_targets)
        self._seconds.observe(event.seconds)
        for metric, value in event.metrics.items():
            self._metrics.labels(metric).set(value)


def require_client() -> Any:
    """Return prometheus_client; raises MissingPackage if it is not installed."""
    return require("prometheus_client", extra="monitoring", purpose="report.prometheus")
