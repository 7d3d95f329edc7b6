"""`finetune launch ray`: what it refuses and derives without Ray, and runs on two raylets of this machine."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from finetune.commands.launch.ray import (
    RayArguments,
    exit_code_of,
    failure_limit,
    fitting_worlds,
    launch_ray,
)
from finetune.commands.launch.ray_worker import RankFailed
from finetune.commands.rehearse.accelerate_file import read_accelerate_file, with_copies_for
from finetune.config.load import load_config
from finetune.errors import MissingPackage, UserError
from tests import launching
from tests.commands.launch.ray_cluster import DDP, RayHosts, RayRun, losses_of, two_raylets
from tests.launch.cluster import until
from tests.small_job import JOB, write_job

ROOT = Path(__file__).parents[3]
STEPS, LONG_STEPS, PACE_SECONDS = 16, 60, 1.0
PACED_JOB = JOB.replace("steps: 8", f"steps: {STEPS}").replace(
    "checkpoint: {every_steps: 4}", "checkpoint: {every_steps: 2}"
)


def arguments(job: Path, **others: object) -> RayArguments:
    return RayArguments(job, DDP, nodes="1:4", gpus_per_node=1, cpu=True, **others)  # type: ignore[arg-type]


def test_world_sizes_that_the_batch_cannot_be_shared_by_are_left_out(tmp_path: Path) -> None:
    loaded, file = load_config(write_job(tmp_path), []), read_accelerate_file(DDP)
    assert fitting_worlds(loaded, file, least=1, most=4) == (1, 2)  # 8 samples, 4 per microbatch
    loaded = load_config(write_job(tmp_path), ["train.microbatch_size=1"])
    assert fitting_worlds(loaded, file, least=1, most=9) == (1, 2, 4, 8)
    assert fitting_worlds(loaded, file, least=3, most=6) == (4,)


def test_a_batch_that_no_number_of_processes_can_share_is_refused(tmp_path: Path) -> None:
    loaded = load_config(write_job(tmp_path), ["train.microbatch_size=1"])
    with pytest.raises(UserError, match="global_batch_size"):
        fitting_worlds(loaded, read_accelerate_file(DDP), least=5, most=7)


def test_hsdp_has_a_copy_for_each_group_that_shards_one(tmp_path: Path) -> None:
    loaded = load_config(write_job(tmp_path), ["train.microbatch_size=1"])
    file = read_accelerate_file(ROOT / "accelerate_configs" / "hsdp.yaml")
    assert fitting_worlds(loaded, file, least=1, most=8) == (2, 4, 8)  # 2 shards in each copy, 8 samples
    assert with_copies_for(file, 8).num_copies == 4 and with_copies_for(file, 2).num_copies == 1


def test_failures_in_a_row_end_the_run_unless_a_later_step_was_saved(tmp_path: Path) -> None:
    limit = failure_limit(SimpleNamespace(UserCallback=object), tmp_path, max_failures=2)
    lost = {1: RankFailed("rank 1 ended with exit code 137: it was killed")}
    limit.after_exception(None, lost)
    limit.after_exception(None, lost)
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    limit.after_exception(None, lost)
    limit.after_exception(None, lost)
    with pytest.raises(RankFailed, match="3 failures in a row made no progress; the last one: rank 1 ended"):
        limit.after_exception(None, lost)


def test_a_host_without_the_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = """\x1b[36mray::RayTrainWorker.init_train_context()\x1b[39m (pid=15680, ip=10.77.0.3, actor_id=34c14ad1)
      File "serialization.py", line 366, in _deserialize_pickle5_data
        obj = pickle.loads(in_band)
ModuleNotFoundError: No module named 'finetune'"""
    assert exit_code_of(RuntimeError(text)) == 2
    assert capsys.readouterr().err.startswith(
        "error: host 10.77.0.3: No module named 'finetune'. Ranks run in the Python"
    )
    assert exit_code_of(RuntimeError("the placement group was removed")) == 1
    assert capsys.readouterr().err == "error: Ray has ended the run: the placement group was removed\n"


def test_a_local_cluster_with_an_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--local starts Ray on this machine"):
        launch_ray(arguments(write_job(tmp_path), local=True, address="head"))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "::1", ""])
def test_an_address_at_which_nothing_listens_is_one_message_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Ray itself would try it for minutes."""
    address = f"{address}:{launching.free_loopback_port()}" if address == "127.0.0.1" else address
    for name in ("ray", "ray.train"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # without `init`
    with pytest.raises(UserError, match=rf"^{address}.*: Ray cannot be reached: "):
        launch_ray(arguments(write_job(tmp_path), address=address))


def test_a_run_at_a_url_needs_a_shared_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.local_folder: is not set"):
        launch_ray(arguments(write_job(tmp_path), override=("run.folder=memory://bucket/run",)))


def test_the_extra_is_named_where_ray_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"finetune-accelerate\[ray\]"):
        launch_ray(arguments(write_job(tmp_path), local=True))


@pytest.fixture(scope="module")
def hosts() -> Iterator[RayHosts]:
    pytest.importorskip("ray", reason="ray is not installed")
    with (
        tempfile.TemporaryDirectory(prefix="ray") as folder,  # the path of a socket has 107 characters
        two_raylets(Path(folder), pace_seconds=PACE_SECONDS, steps=LONG_STEPS) as started,
    ):
        yield started


@pytest.fixture(scope="module")
def torchrun_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same job on two processes of torchrun."""
    job = write_job(tmp_path_factory.mktemp("torchrun"), text=PACED_JOB)
    words = ["-m", "finetune", "train", "--config", str(job), "--accelerate", str(DDP)]
    assert launching.run(launching.torchrun_command(*words), log=job.parent / "log", timeout_seconds=300) == 0
    return losses_of(job.parent / "runs" / "job")


@pytest.mark.slow
@pytest.mark.distributed
class TestTwoRaylets:
    def test_a_mistake_of_the_user_is_not_retried(self, hosts: RayHosts, tmp_path: Path) -> None:
        job = write_job(tmp_path, text=PACED_JOB)
        (tmp_path / "train.jsonl").write_text('{"messages": 7}\n')
        run = RayRun(job, hosts)
        assert run.finish() == 2, run.log.read_text()
        assert run.log.read_text().count("finetune: attempt ") == 1
        assert run.status()["exit_code"] == 2

    def test_ctrl_c_saves_and_the_same_command_resumes(
        self, hosts: RayHosts, tmp_path: Path, torchrun_losses: dict[int, float]
    ) -> None:
        run = RayRun(write_job(tmp_path, text=PACED_JOB), hosts)
        run.wait_for_step(3)
        run.stop()
        assert run.finish() == 130, run.log.read_text()
        step = run.status()["step"]
        assert (run.folder / "checkpoints" / f"step-{step:06d}").is_dir()
        again = RayRun(tmp_path / "job.yaml", hosts)
        assert again.finish() == 0, again.log.read_text()
        assert again.losses() == pytest.approx(torchrun_losses, rel=1e-4)

    def test_a_lost_host_is_left_out_and_the_run_continues_with_the_next_sample(
        self, hosts: RayHosts, tmp_path: Path, torchrun_losses: dict[int, float]
    ) -> None:
        run = RayRun(write_job(tmp_path, text=PACED_JOB), hosts)
        run.wait_for_step(3)
        lost_at = hosts.lose()
        assert run.finish() == 0, run.log.read_text()
        resumed_at = max(event["time"] for event in run.events("RunStarted"))
        first = next(event for event in run.events("StepTaken") if event["time"] > resumed_at)
        print(f"{first['time'] - lost_at:.1f} s from the loss of a host to step {first['step']}")
        assert 2 < first["step"] < STEPS  # resumed from a checkpoint
        assert run.losses() == pytest.approx(torchrun_losses, rel=1e-4)
        log = run.log.read_text()
        assert "attempt 1, world size 2" in log and "world size 1" in log
        assert "is lost; the run continues on the others" in log

    def test_a_host_that_comes_takes_part(self, hosts: RayHosts, tmp_path: Path) -> None:
        """The host before has been lost by now."""
        run = RayRun(write_job(tmp_path, text=PACED_JOB.replace(f"steps: {STEPS}", f"steps: {LONG_STEPS}")), hosts)
        run.wait_for_step(2)
        hosts.add()
        assert run.finish() == 0, run.log.read_text()
        log = run.log.read_text()
        assert "attempt 1, world size 1" in log and "attempt 2, world size 2" in log
        steps = [event["step"] for event in run.events("StepTaken")]
        assert steps == list(range(1, LONG_STEPS + 1))  # all were saved before the second attempt

    def test_ranks_save_when_the_command_is_killed(self, hosts: RayHosts, tmp_path: Path) -> None:
        """As `ray job stop` does 3 s after its request. Ray keeps the workers reserved for 3 minutes: the last test."""
        run = RayRun(write_job(tmp_path, text=PACED_JOB), hosts)
        run.wait_for_step(3)
        run.process.kill()
        until(lambda: run.status().get("exit_code") == 143, seconds=60)
        assert (run.folder / "checkpoints" / f"step-{run.status()['step']:06d}").is_dir()
