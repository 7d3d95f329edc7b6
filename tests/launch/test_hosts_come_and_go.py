"""A run on two hosts goes on when one is lost and takes it in again, and ends where an undisturbed one does.

Hosts are network namespaces and talk through gloo: what NCCL does when a host is lost is not seen here.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.launch.supervisor.shared_folder import ATTEMPT_FILE
from finetune.report.jsonl import read_events
from tests import launching
from tests.launch.cluster import Host, cluster, has_namespaces, orphans, read_status, until

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not has_namespaces(), reason="needs root, to make network namespaces"),
]

STEPS = 120


def write_job(folder: Path, name: str) -> Path:
    """Write a small job; returns its path."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        texts = [f"{number} is followed by {number + 1}. " * (1 + number % 5) for number in range(160)]
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    values = {
        "run": {"folder": str(folder / name), "seed": 7, "hang_after_seconds": 60},
        "model": {
            "from_config": {"model_type": "llama", "values": {**sizes, "num_key_value_heads": 2}},
            "tokenizer": {"train": {"vocabulary_size": 300}},
        },
        "data": {
            "train": {"path": str(rows), "format": "text"},
            "max_length": 128,
            "cache_folder": str(folder / "cache"),
        },
        "task": {"name": "pretrain"},
        "train": {"global_batch_size": 8, "microbatch_size": 2, "steps": STEPS, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "export": {"verify": False},
        "report": {"console": "plain", "log_every_steps": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on one process; returns its folder, beside which the others are made."""
    folder = tmp_path_factory.mktemp("hosts")
    job = write_job(folder, "alone")
    command = [sys.executable, "-m", "finetune", "--config", str(job)]
    assert launching.run(command, log=folder / "alone.log", timeout_seconds=240) == 0
    return folder


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with cluster(2) as made:
        yield made


def supervise(host: Host, job: Path, *, strategy: str, least: int = 1) -> None:
    """Start the host's supervisor."""
    words = [
        *("-m", "finetune", "launch", "torchrun", "--supervise", "--config", str(job)),
        *("--accelerate", f"accelerate_configs/{strategy}.yaml", "--nodes", f"{least}:2", "--gpus-per-node", "2"),
        *("--name", host.name, "--interface", "eth0", "--lost-after", "4", "--join", "60", "--stop", "20"),
    ]
    host.begin(*words, log=job.with_name(f"{host.name}.log"))


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; of a step that was taken again, the later one."""
    events = read_events(folder / "events.jsonl")
    return {event["step"]: event["loss"] for event in events if event["event"] == "StepTaken"}


def attempt(folder: Path) -> dict:
    path = folder / "supervisors" / ATTEMPT_FILE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def until_step(folder: Path, step: int) -> None:
    until(lambda: read_status(folder).get("state") == "running" and read_status(folder)["step"] >= step)


def require_same(folder: Path, undisturbed: Path) -> None:
    """Fail unless every step was taken, with the loss that it has on one process."""
    expected, found = losses(undisturbed / "alone"), losses(folder)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-4


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_host_is_lost_and_returns(undisturbed: Path, hosts: list[Host]) -> None:
    second = hosts[1]
    job, folder = write_job(undisturbed, "fsdp2"), undisturbed / "fsdp2"
    for host in hosts:
        supervise(host, job, strategy="multi_node_fsdp2")
    until_step(folder, 12)
    second.kill()
    until(lambda: attempt(folder)["hosts"] == ["h1"])
    until(lambda: read_status(folder).get("state") == "running" and len(read_status(folder)["ranks"]) == 2)
    supervise(second, job, strategy="multi_node_fsdp2")
    until(lambda: attempt(folder)["hosts"] == ["h1", "h2"])
    until(lambda: all(program.poll() is not None for host in hosts for program in host.programs))
    assert [program.returncode for host in hosts for program in host.programs] == [0, 0], job.with_name("h1.log")
    assert attempt(folder)["exit_code"] == 0
    assert not orphans(hosts)
    require_same(folder, undisturbed)
