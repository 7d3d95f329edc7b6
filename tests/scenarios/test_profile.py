"""Where the time of a real run goes: the table adds up, the traces open, and the numbers are those without."""

import gzip
import json
import re
import urllib.request

import pytest

from finetune.config.load import load_config
from finetune.report.history import read_events
from finetune.report.phases import PHASES
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.runtime.files.digests import file_digest
from finetune.runtime.processes import free_loopback_port
from tests.scenarios.trained import forget, stay

PROFILED = "report.profile={start: 3, steps: 3}"
STEP = ["model.gradient_checkpointing=true", "train.microbatch_size=2", "train.steps=6", "evaluate.every_steps=4"]
SECONDS_LATE = 1.0
SLOW_RANK_1 = f"forward step=3 rank=1 do=sleep seconds={SECONDS_LATE}"  # in the fourth step


@pytest.fixture
def train(job, monkeypatch):
    """Train in this process; returns the events of that start."""
    monkeypatch.setattr(distributed, "shut_down", stay)

    def start(name, *overrides):
        folder = job.parent / "runs" / f"profile-{name}"
        written = folder / "events.jsonl"
        num_before = len(read_events(written)) if written.exists() else 0
        quick = ["train.steps=6", "checkpoint.every_steps=6", "evaluate=null", "data.validation=null"]
        train_from_config(load_config(job, [f"run.folder={folder}", *quick, *overrides]))
        forget()
        return folder, read_events(written)[num_before:]

    return start


def events_of(events, name):
    return [event for event in events if event["event"] == name]


def test_a_run_that_stops_inside_the_window_profiles_the_rest_when_it_resumes(train):
    plain, _ = train("plain")
    folder, first = train("stopped", PROFILED, "train.stop_after_steps=4")
    _, second = train("stopped", PROFILED, "train.stop_after_steps=5")
    _, third = train("stopped", PROFILED)
    windows = [events_of(events, "Profiled") for events in (first, second, third)]
    assert [[(each["first_step"], each["num_steps"]) for each in found] for found in windows] == [
        [(3, 2)],
        [(5, 1)],
        [],
    ]
    assert [each["message"] for each in events_of(third, "Noted") if "report.profile" in each["message"]] == [
        "report.profile: steps 3 to 5 are over; nothing is profiled"
    ]
    written = {path.relative_to(folder / "profile").as_posix() for path in folder.glob("profile/*/*.json*")}
    traces = {f"steps-{window}/rank-0.pt.trace.json.gz" for window in ("000003-000004", "000005-000005")}
    assert written == traces
    assert weights(folder) == weights(plain)


def weights(folder):
    return file_digest(folder / "final" / "model.safetensors")


@pytest.mark.full
@pytest.mark.distributed
def test_the_phases_of_two_ranks_add_up_and_change_nothing(launch):
    profiled = launch("fsdp2", name="profiled", overrides=[*STEP, PROFILED], faults=SLOW_RANK_1)
    assert profiled.code == 0, profiled.output
    (event,) = profiled.events("Profiled")
    assert tuple(event["seconds"]) == PHASES
    assert sum(event["seconds"].values()) == pytest.approx(event["wall_seconds"], rel=0.03)
    assert all(event["seconds"][phase] > 0 for phase in PHASES)
    steps = [each["seconds"] for each in profiled.events("StepTaken")[2:5]]
    assert sum(steps) < event["wall_seconds"]
    assert event["ranks"]["busy"]["slowest_rank"] == 1
    assert event["seconds"]["communication"] > 0.9 * SECONDS_LATE  # rank 0 waited for it
    assert re.search(rf"\n  busy .* {1000 * event['ranks']['busy']['max'] / 3:.2f}  rank 1\n", profiled.output)
    assert "profile of steps 3 to 5" in profiled.output
    for rank in (0, 1):
        path = profiled.folder / "profile" / "steps-000003-000005" / f"rank-{rank}.pt.trace.json.gz"
        with gzip.open(path) as file:
            names = {each["name"] for each in json.load(file)["traceEvents"]}
        assert {f"finetune.{phase}" for phase in PHASES} - {"finetune.communication", "finetune.other"} <= names
        assert {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"} <= names
        assert any(name.startswith("gloo:") for name in names)
    plain = launch("fsdp2", name="not-profiled", overrides=STEP)
    assert (profiled.losses(), profiled.norms()) == (plain.losses(), plain.norms())
    assert weights(profiled.folder) == weights(plain.folder)


@pytest.mark.full
def test_metrics_are_served_while_a_run_trains(begin):
    pytest.importorskip("prometheus_client")
    port = free_loopback_port()
    quiet = ["evaluate=null", "data.validation=null", "train.steps=20000", "checkpoint.every_steps=20000"]
    running = begin(None, name="served", overrides=[*quiet, f"report.prometheus={port}"])
    running.until(lambda: running.steps() >= 2)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['finetune_run_info{name="served",strategy="single",world="1"}'] == "1.0"
    assert float(values["finetune_step"]) >= 2
    assert float(values["finetune_tokens_total"]) > 0
    assert float(values["finetune_step_seconds_count"]) >= 2
