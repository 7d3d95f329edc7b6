"""Processes that `srun`, `mpirun` or torchrun has started train exactly what those of `accelerate launch` do."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests import launching
from tests.scenarios.conftest import TIMEOUT_SECONDS, Ended
from tests.scenarios.running import Running

SHORT = ["train.steps=4", "checkpoint.every_steps=4", "data.validation=null", "evaluate=null"]

pytestmark = [pytest.mark.distributed, pytest.mark.full]


def of_srun(rank: int, job: int) -> dict[str, str]:
    """What `srun --ntasks 2` on one host sets for a task."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def of_mpirun(rank: int, job: int) -> dict[str, str]:
    """What `mpirun -n 2` of Open MPI sets for a process."""
    names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {
        "PMIX_NAMESPACE": f"test-{job}@1"
    }


def words_of(job: Path, folder: Path, overrides: Sequence[str], strategy: str | None) -> list[str]:
    words = ["-m", "finetune", "--config", str(job)]
    words += [word for each in (f"run.folder={folder}", *overrides) for word in ("--set", each)]
    return words if strategy is None else [*words, "--accelerate", f"accelerate_configs/{strategy}.yaml"]


@pytest.fixture
def begin_tasks(job) -> Iterator[Callable[..., list[Running]]]:
    """Start two processes as `srun` or `mpirun` does: each by itself, with its variables."""
    begun: list[Running] = []

    def start(
        variables: Callable[[int, int], Mapping[str, str]],
        *,
        name: str,
        strategy: str | None,
        overrides: Sequence[str] = SHORT,
    ) -> list[Running]:
        folder, port = job.parent / "runs" / name, launching.free_loopback_port()
        words = [sys.executable, *words_of(job, folder, overrides, strategy)]
        tasks = []
        for rank in range(2):
            log = job.parent / "logs" / f"{name}-{rank}.log"
            environment = {**variables(rank, port), "MASTER_PORT": str(port)}
            tasks.append(Running(words, folder=folder, log=log, environment=environment))
        begun.extend(tasks)
        return tasks

    yield start
    for running in begun:
        with contextlib.suppress(OSError):
            running.kill_all()


def ended(tasks: list[Running]) -> Ended:
    codes = [task.until_ended() for task in tasks]
    output = "".join(task.output for task in tasks)
    assert len(set(codes)) == 1, output
    return Ended(codes[0], output, tasks[0].folder)


@pytest.fixture(scope="module")
def accelerated(launch) -> Callable[[str], Ended]:
    """The run under `accelerate launch`, once for each strategy."""
    runs: dict[str, Ended] = {}

    def run(strategy: str) -> Ended:
        if strategy not in runs:
            runs[strategy] = launch(strategy, name=f"accelerated-{strategy}", overrides=SHORT)
        assert runs[strategy].code == 0, runs[strategy].output
        return runs[strategy]

    return run


def assert_same(run: Ended, wanted: Ended, *, strategy: str) -> None:
    assert run.code == 0, run.output
    assert len(wanted.losses()) == 4
    assert (run.losses(), run.norms()) == (wanted.losses(), wanted.norms())  # bitwise
    assert f"{strategy} on 2 processes" in run.output and f"{strategy} on 2 processes" in wanted.output


def test_srun_tasks_have_the_losses_of_accelerate_launch(begin_tasks, accelerated):
    run = ended(begin_tasks(of_srun, name="srun", strategy="fsdp2"))
    assert_same(run, accelerated("fsdp2"), strategy="fsdp2")
    assert "2 processes by srun (step" in run.output
    assert run.environment()["launcher"]["WORLD_SIZE"] == "2"


def test_torchrun_with_an_accelerate_file_has_the_losses_of_accelerate_launch(job, accelerated):
    folder, log = (job.parent / kind / "torchrun" for kind in ("runs", "logs"))
    command = launching.torchrun_command(*words_of(job, folder, SHORT, "fsdp2"))
    code = launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS)
    assert_same(Ended(code, log.read_text(), folder), accelerated("fsdp2"), strategy="fsdp2")


def test_train_with_processes_has_the_losses_of_accelerate_launch(job, accelerated, tmp_path):
    """By name, and from a folder without accelerate files."""
    folder, log = (job.parent / kind / "processes" for kind in ("runs", "logs"))
    words = words_of(job, folder, SHORT, "fsdp2")[:-1]
    command = [sys.executable, *words, "fsdp2", "--processes", "2"]
    code = launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, folder=tmp_path)
    assert_same(Ended(code, log.read_text(), folder), accelerated("fsdp2"), strategy="fsdp2")


def test_sigterm_to_train_with_processes_saves_and_ends_with_143(job):
    folder, log = (job.parent / kind / "processes-term" for kind in ("runs", "logs"))
    overrides = [*SHORT, "train.steps=2000", "checkpoint.every_steps=1000"]
    words = [sys.executable, *words_of(job, folder, overrides, None), "--processes", "2"]
    running = Running(words, folder=folder, log=log, environment={})
    try:
        running.until(lambda: running.steps() > 2)
        running.process.send_signal(signal.SIGTERM)
        assert running.until_ended() == 143, running.output
    finally:
        running.kill_all()
    assert running.status()["reason"] == "signal SIGTERM"
    assert len(running.checkpoints()) == 1
    assert "Traceback" not in running.output and "closing signal" not in running.output


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.setps=4"], "there is no such key. Did you mean `steps`?"),  # before any rank is started
        (["run.strategy=zero3"], "Launch with --config_file accelerate_configs/zero3.yaml"),  # by the ranks
    ],
)
def test_a_mistake_under_train_with_processes_is_one_message(job, tmp_path, overrides, message):
    words = [sys.executable, *words_of(job, tmp_path / "run", [*SHORT, *overrides], None), "--processes", "2"]
    code = launching.run(words, log=tmp_path / "log", timeout_seconds=TIMEOUT_SECONDS)
    output = (tmp_path / "log").read_text()
    assert code == 2, output
    assert output.count("error:") == 1 and message in output
    assert "Traceback" not in output and "launcher" not in output


def test_mpirun_without_an_accelerate_file_uses_ddp_and_logs_it(begin_tasks, accelerated):
    run = ended(begin_tasks(of_mpirun, name="mpirun-ddp", strategy=None))
    assert_same(run, accelerated("ddp"), strategy="ddp")
    assert "2 processes by mpirun (Open MPI)" in run.output
    assert run.output.count("ddp: no accelerate file was given. --accelerate FILE chooses another strategy.") == 1


def test_sigterm_to_each_task_saves_and_ends_with_143_and_the_run_resumes(begin_tasks, accelerated):
    """`scancel` and `--signal=TERM@180` signal every task; no launcher stands between."""
    long = [*SHORT, "train.steps=2000", "checkpoint.every_steps=1000"]
    tasks = begin_tasks(of_srun, name="srun-term", strategy="fsdp2", overrides=long)
    tasks[0].until(lambda: tasks[0].steps() > 2)
    ranks = tasks[0].pids()
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    stopped = ended(tasks)
    assert (stopped.code, stopped.status()["reason"]) == (143, "signal SIGTERM"), stopped.output
    (saved,) = stopped.checkpoints()
    step = int(saved.removeprefix("step-"))
    resumed = ended(
        begin_tasks(
            of_srun, name="srun-term", strategy="fsdp2", overrides=[*long, f"train.stop_after_steps={step + 1}"]
        )
    )
    assert resumed.code == 0, resumed.output
    assert [event["step"] for event in resumed.events("StepTaken")] == list(range(1, step + 2))


def test_a_mesh_for_another_number_of_processes_is_one_message(begin_tasks):
    run = ended(begin_tasks(of_srun, name="srun-hsdp", strategy="hsdp"))
    assert run.code == 2
    sizes = "parallelism_config: dp_replicate_size: 2 x dp_shard_size: 2"
    assert f"{sizes} is for 4 processes, and 2 were" in run.output
    assert "Traceback" not in run.output
