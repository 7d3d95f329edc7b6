"""What the job files start really trains, saves when it is asked to stop, and resumes: on one machine, over gloo.

`srun` and the others are stand-ins; two "hosts" are two launchers on 127.0.0.2.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
from ruamel.yaml import YAML

from finetune.commands.launch import job_files
from finetune.commands.launch.attempt_end import AGAIN
from finetune.commands.launch.job_files import JobFileArguments
from finetune.commands.launch.kubernetes import KubernetesArguments, launch_kubernetes
from finetune.commands.launch.slurm import SlurmArguments, launch_slurm
from finetune.report.history import read_events
from finetune.runtime.supervision import heartbeat
from tests.launch import fake_slurm
from tests.launch.cluster import read_status, until
from tests.launch.expansion import as_kubernetes_expands

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
STEPS = 300
ADDRESS = "127.0.0.2"
PACE = "; ".join(f"data step={step} do=sleep seconds=0.03" for step in range(1, STEPS + 1))
"""A run whose status is read still goes on; the file is up to three seconds old."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small job, whose name has to be quoted; /tmp is shared by these hosts."""
    folder = tmp_path / "it's a $(project)"
    folder.mkdir()
    texts = [f"{number} is followed by {number + 1}. " * (1 + number % 5) for number in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    values = {
        "run": {"folder": "a run", "seed": 7, "hang_after_seconds": 60},
        "model": {
            "from_config": {"model_type": "llama", "values": {**sizes, "num_key_value_heads": 2}},
            "tokenizer": {"train": {"vocabulary_size": 300}},
        },
        "data": {"train": {"path": "rows.jsonl", "format": "text"}, "max_length": 64, "cache_folder": "cache"},
        "task": {"name": "pretrain"},
        "train": {"global_batch_size": 4, "microbatch_size": 2, "steps": STEPS, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 1000, "keep_last": 2},
        "export": {"verify": False},
        "report": {"console": "plain", "log_every_steps": 1},
    }
    (folder / "job.yaml").write_text(json.dumps(values))
    (folder / "ddp.yaml").write_text((ROOT / "accelerate_configs" / "ddp.yaml").read_text())
    monkeypatch.setattr(job_files, "_LOCAL_FOLDERS", ())
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a script; whatever it has started is gone after the test."""
    programs: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], environment: Mapping[str, str], *, log: Path) -> subprocess.Popen[bytes]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {**os.environ, heartbeat.VARIABLE: PACE, "PATH": path, **environment}
        with log.open("ab") as output:
            programs.append(subprocess.Popen(command, stdout=output, stderr=output, env=variables))
        return programs[-1]

    yield start
    for program in programs:
        if program.poll() is None:
            tree = [*psutil.Process(program.pid).children(recursive=True), psutil.Process(program.pid)]
            for each in tree:
                each.kill()
            program.wait()


def words(project: Path, output: Path, *override: str) -> JobFileArguments:
    files = (project / "job.yaml", project / "ddp.yaml")
    return JobFileArguments(*files, nodes=2, gpus_per_node=1, cpu=True, override=override, output=output)


def until_step(run: Path, step: int) -> None:
    until(lambda: read_status(run).get("state") == "running" and read_status(run)["step"] >= step)


def require_every_step_once(run: Path) -> None:
    steps = [event["step"] for event in read_events(run / "events.jsonl") if event["event"] == "StepTaken"]
    assert sorted(steps) == list(range(1, STEPS + 1))


def test_a_slurm_job_is_stopped_requeued_and_finishes(project: Path, started) -> None:
    fake, run, log = project / "fake", project / "a run", project / "slurm.log"
    programs = fake_slurm.install(fake)
    script = project / "job.sbatch"
    assert launch_slurm(words(project, script), SlurmArguments()) == 0
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    first = started(["bash", str(script)], {**fake_slurm.variables(fake, restart=0), "PATH": path}, log=log)
    until_step(run, 10)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 0, log.read_text()
    assert (fake / "requeued").read_text().split() == ["4242"]
    assert read_status(run)["exit_code"] == 143 and 10 <= read_status(run)["step"] < STEPS

    second = started(["bash", str(script)], {**fake_slurm.variables(fake, restart=1), "PATH": path}, log=log)
    assert second.wait(120) == 0, log.read_text()
    assert read_status(run)["state"] == "finished"
    assert (fake / "requeued").read_text().split() == ["4242"]
    require_every_step_once(run)
    for restart in (0, 1):
        logs = sorted((run / "logs" / f"4242-{restart}").glob("host-*/*/attempt_0/0/stdout.log"))
        assert len(logs) == 2 and logs[0].read_text()
    text = log.read_text()
    assert "restart the job from step" in text and "the job is over, exit code 0: finished" in text


def test_pods_are_stopped_and_start_again_as_one_run(project: Path, started) -> None:
    run, log = project / "a run", project / "hosts.log"
    pods = project / "pods.yaml"
    kubernetes = KubernetesArguments("image", claim=(f"data:{project}",))
    assert launch_kubernetes(words(project, pods), kubernetes) == 0
    objects = list(YAML(typ="safe").load_all(pods.read_text()))
    (container,) = objects[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    command = [as_kubernetes_expands(text, variables) for text in container["command"]]
    command[-1] = command[-1].replace("MASTER_ADDR=a-run-node-0-0.a-run", f"MASTER_ADDR={ADDRESS}")

    def start_pods() -> list[subprocess.Popen[bytes]]:
        return [started(command, {**variables, "JOB_COMPLETION_INDEX": str(index)}, log=log) for index in (0, 1)]

    hosts = start_pods()
    until_step(run, 10)
    hosts[1].send_signal(signal.SIGTERM)
    assert [host.wait(60) for host in hosts] == [AGAIN, AGAIN], log.read_text()
    assert read_status(run)["exit_code"] == 143
    assert [host.wait(120) for host in start_pods()] == [0, 0], log.read_text()
    require_every_step_once(run)
