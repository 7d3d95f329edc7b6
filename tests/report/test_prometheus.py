"""What Prometheus reads of a run, and that the dashboard asks for nothing else."""

import json
import re
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.config.sections.report import ReportSection
from finetune.errors import MissingPackage
from finetune.report import prometheus
from finetune.report.events import CheckpointSaved, Evaluated, RunEnded, StepSkipped, Warned
from finetune.report.gpu import COLUMNS
from finetune.report.prometheus import PrometheusReporter
from finetune.report.reporter import FanOut
from finetune.run.state.run_folder import build_reporter
from finetune.runtime.processes import free_loopback_port

pytest.importorskip("prometheus_client")
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-dashboard.json"
SAMPLE = re.compile(r"^(\w+)(\{.*\})? (\S+)$")


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {f"{match[1]}{match[2] or ''}": float(match[3]) for line in lines if (match := SAMPLE.match(line))}


@pytest.fixture
def served(started, take_step):
    """A reporter that has seen one event of each kind, and its port."""
    port = free_loopback_port()
    reporter = PrometheusReporter(port, address="127.0.0.1", name="poems", world=4)
    reporter(replace(started, flops_per_token=6e6, peak_flops_per_second=1e12))
    columns = {name: float(number) for number, name in enumerate(COLUMNS, start=1)}
    reporter(take_step(20, metrics={"accuracy": 0.75}, device=columns))
    reporter(StepSkipped(21, "non-finite", (1, 2)))
    reporter(Evaluated(20, {"loss": 1.5}, num_rows=7, seconds=0.1))
    reporter(CheckpointSaved(20, "step-000020", 100, seconds=1.0, stall_seconds=0.1))
    reporter(Warned(20, "careful"))
    yield reporter, port
    reporter.close()


def test_a_run_is_served_as_of_its_last_events(served):
    _, port = served
    found = scrape(port)
    assert found['finetune_run_info{name="poems",strategy="zero2",world="4"}'] == 1
    assert found["finetune_step"] == 20
    assert found["finetune_num_steps"] == 120
    assert found["finetune_loss"] == 2.31071
    assert found["finetune_learning_rate"] == 9.8e-4
    assert found["finetune_gradient_norm"] == 1.02
    assert found["finetune_tokens_total"] == found["finetune_tokens_per_second"] == 1234
    assert found["finetune_mfu_ratio"] == pytest.approx(1234 * 6e6 / 1e12)
    assert found["finetune_data_wait_ratio"] == 0.01
    assert found["finetune_memory_bytes"] == 1.2e9
    assert found['finetune_step_seconds_bucket{le="1.0"}'] == found["finetune_step_seconds_count"] == 1
    assert found["finetune_checkpoints_total"] == found["finetune_warnings_total"] == 1
    assert 0 <= found["finetune_last_checkpoint_age_seconds"] < 60
    assert found['finetune_skipped_steps_total{reason="non-finite"}'] == 1
    assert found['finetune_evaluation{metric="loss"}'] == 1.5
    assert found['finetune_step_metric{metric="accuracy"}'] == 0.75
    assert [found[f"finetune_{name}"] for name in COLUMNS] == [1, 2, 3, 4]


def test_unknown_metrics_are_not_served_to_prometheus(served, take_step):
    reporter, port = served
    reporter(take_step(21))  # the GPU is lost
    assert not {f"finetune_{name}" for name in COLUMNS} & scrape(port).keys()


def test_a_name_cannot_add_a_line(started):
    hostile = 'a"} 1\nfinetune_loss 0\n# HELP x \\" \\n{'
    port = free_loopback_port()
    reporter = PrometheusReporter(port, address="127.0.0.1", name=hostile, world=1)
    reporter(started)
    reporter(Evaluated(20, {hostile: 1.5}, num_rows=7, seconds=0.1))
    found = scrape(port)
    reporter.close()
    assert "finetune_loss" not in found
    escaped = hostile.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    assert found[f'finetune_evaluation{{metric="{escaped}"}}'] == 1.5


def test_an_ended_run_is_reported_and_its_metrics_endpoint_closes(served):
    reporter, port = served
    reporter(RunEnded(20, "finished", 1.0, {}, None))
    assert scrape(port)["finetune_running"] == 0
    reporter.close()
    with pytest.raises(OSError):
        scrape(port)


def test_every_query_of_the_dashboard_names_a_metric_that_is_served(served):
    _, port = served
    names = {key.split("{")[0] for key in scrape(port)}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    asked = {name for query in queries for name in re.findall(r"finetune_\w+", query)}
    assert len(queries) > 20
    assert asked <= names
    assert {f"finetune_{name}" for name in COLUMNS} <= asked


def test_a_port_in_use_is_a_warning_and_other_reporters_continue(diary, started, take_step):
    watching = diary()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reporter = FanOut([watching, PrometheusReporter(port, address="127.0.0.1", name="a", world=1)])
        reporter(started)
        reporter(take_step(1))
    kinds = [type(event).__name__ for event in watching.events]
    assert kinds == ["RunStarted", "Warned", "StepTaken"]
    assert f"port {port} of 127.0.0.1 cannot be served" in watching.events[1].message


def test_the_package_is_asked_for_before_the_run_starts(monkeypatch, tmp_path):
    def missing(module, *, extra, purpose):
        raise MissingPackage(f"{purpose}: pip install 'finetune-accelerate[{extra}]'")

    monkeypatch.setattr(prometheus, "require", missing)
    with pytest.raises(MissingPackage, match=r"finetune-accelerate\[monitoring\]"):
        build_reporter(ReportSection(prometheus=9400), run_folder=tmp_path, is_main=False)
