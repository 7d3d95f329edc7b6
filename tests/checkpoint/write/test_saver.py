"""What a save leaves on disk and reports, and when the run stops because of one that failed."""

import threading
from concurrent.futures import wait
from unittest.mock import patch

import pytest
import torch

from finetune.checkpoint.format.manifest import read_manifest
from finetune.checkpoint.read.load import verify_checkpoint
from finetune.checkpoint.write.saver import SavedCheckpoint, require_host_memory, require_space_for_saves
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError, NonFiniteError
from finetune.runtime.progress import Progress
from finetune.runtime.resources import available_bytes
from tests.checkpoint.small_run import Run
from tests.refusals import refused

BOTH_WAYS = pytest.mark.parametrize("asynchronous", [True, False])
FULL = "save.write step=2 do=no_space"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_background_checkpoint_holds_the_state_at_its_step_while_training_continues(folder):
    straight = Run(folder.with_name("straight")).train(range(2))
    may_write = threading.Event()
    with patch(
        "finetune.checkpoint.write.writer._stage", side_effect=lambda staging, **_: wait_and_make(may_write, staging)
    ):
        run = Run(folder).train(range(2), save=False)
        run.saver(Progress(2, num_tokens=10))
        run.saver.report_written()
        assert run.saved == []
        run.train(range(2, 4), save=False)
        may_write.set()
        run.saver.wait_for_writes()
    (saved,) = run.saved
    assert saved.stall_seconds <= saved.seconds
    assert read_manifest(folder / "step-000002").state_sha256 == digest_of(straight, 2)


def wait_and_make(may_write, staging):
    assert may_write.wait(60)
    staging.mkdir(parents=True)


def digest_of(run, step):
    return read_manifest(run.folder / f"step-{step:06d}").state_sha256


def test_memory_for_the_copy_is_taken_once(folder):
    run = Run(folder)
    run.saver.rehearse(num_saves=5)
    places = {name: buffer.data_ptr() for name, buffer in run.saver._contents._buffers.items()}
    run.train(range(3))
    after = {name: buffer.data_ptr() for name, buffer in run.saver._contents._buffers.items()}
    assert len(places) == 6 * 3 + 3  # as many as there are once the optimizer has made its state
    assert after == places


@BOTH_WAYS
def test_a_failed_write_is_logged_and_retried(folder, fail, asynchronous):
    fail(FULL)
    run = Run(folder, asynchronous=asynchronous).train(range(2))
    assert len(run.said) == 1
    assert "step 2 could not be written; retrying in" in run.said[0]
    assert "No space left on device. " in run.said[0] and "are free" in run.said[0]
    assert verify_checkpoint(folder / "step-000002").step == 2
    assert names(folder) == ["step-000001", "step-000002"]


@BOTH_WAYS
def test_a_save_that_fails_three_times_is_an_error_and_leaves_only_the_old_checkpoints(folder, fail, asynchronous):
    fail(FULL, FULL, FULL)
    with refused(CheckpointError, "step 2", "3 times", varies=True):
        Run(folder, asynchronous=asynchronous).train(range(2))
    assert names(folder) == ["step-000001"]


@pytest.mark.parametrize("point", ["save.manifest", "save.rename", "save.done", "prune.rename", "prune.delete"])
def test_a_save_that_fails_at_any_point_succeeds_on_the_retry(folder, fail, point):
    fail(f"{point} do=raise")
    run = Run(folder).train(range(4))
    assert "RuntimeError: injected fault at " in run.said[0]
    assert names(folder) == ["step-000003", "step-000004"]


def test_folders_left_by_a_killed_pruning_are_removed_by_a_later_save(folder):
    (folder / ".deleted-step-000001" / "model").mkdir(parents=True)
    Run(folder).train(range(1))
    assert names(folder) == ["step-000001"]


def test_a_checkpoint_that_cannot_be_deleted_is_logged_and_the_new_one_is_valid(folder):
    run = Run(folder)
    with patch("finetune.checkpoint.write.retention.shutil.rmtree", side_effect=PermissionError("not yours")):
        run.train(range(3))
    assert names(folder) == [".deleted-step-000001", "step-000002", "step-000003"]
    assert "could not delete" in run.said[0] and "not yours" in run.said[0]


@BOTH_WAYS
@pytest.mark.parametrize("key", ["parameter", "exp_avg_sq"])
def test_a_state_that_is_not_finite_is_not_saved(folder, asynchronous, key):
    run = Run(folder, asynchronous=asynchronous).train(range(2))
    weight = run.model[2].weight
    bad = weight if key == "parameter" else run.optimizer.state[weight][key]
    with torch.no_grad():
        bad[0, 1] = float("inf")
    name = "2.weight" if key == "parameter" else "2.weight/exp_avg_sq"
    with refused(NonFiniteError, f"step 3: {name}", "step-000002"):
        run.save(Progress(3))
    assert names(folder) == ["step-000001", "step-000002"]


def test_the_saver_keeps_the_best_and_the_milestones_in_addition_to_the_newest(folder):
    run = Run(folder, keep_every_steps=3, keep_best={"metric": "loss"})
    for step, loss in enumerate([0.5, 0.1, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8], start=1):
        run.save(Progress(step, last_metrics={"loss": loss}, metrics_step=step))
    assert names(folder) == [f"step-{step:06d}" for step in (2, 3, 6, 7, 8)]
    assert read_manifest(folder / "step-000002").metrics == {"loss": 0.1}


def train_and_save(run, step):
    run.train(range(step - 1, step), save=False)
    run.saver(Progress(step=step))


def wait_on_this_rank(run):
    """Wait as the loop never does, so that the save in the background has ended."""
    if run.saver._future is not None:
        wait([run.saver._future])


@BOTH_WAYS
def test_each_checkpoint_is_reported_once_when_it_is_complete(folder, asynchronous):
    run = Run(folder, asynchronous=asynchronous, keep_last=3)
    for step in (1, 2, 3):
        train_and_save(run, step)
        run.saver.report_written()
    run.saver.wait_for_writes()
    run.saver.wait_for_writes()  # there is nothing left to wait for
    assert [checkpoint.step for checkpoint in run.events] == [1, 2, 3]
    assert [checkpoint.path for checkpoint in run.events] == [folder / f"step-00000{step}" for step in (1, 2, 3)]
    assert all(0 < checkpoint.stall_seconds <= checkpoint.seconds for checkpoint in run.events)
    assert not run.saver.has_failed


def test_the_next_save_waits_for_the_previous_one(folder):
    run, may_write = Run(folder), threading.Event()
    with patch(
        "finetune.checkpoint.write.saver.prune_checkpoints",
        side_effect=lambda *_, **__: [] if may_write.wait(60) else ["late"],
    ):
        train_and_save(run, 1)
        run.saver.report_written()
        assert run.events == []
        threading.Timer(0.05, may_write.set).start()
        train_and_save(run, 2)
        assert [checkpoint.step for checkpoint in run.events] == [1]
        run.saver.wait_for_writes()
    assert [checkpoint.step for checkpoint in run.events] == [1, 2]


def test_a_failed_save_in_the_background_is_noticed_at_the_next_step_and_ends_the_run(folder, fail):
    fail(FULL, FULL, FULL)
    run = Run(folder)
    train_and_save(run, 1)
    train_and_save(run, 2)
    wait_on_this_rank(run)
    assert run.saver.has_failed
    run.saver.report_written()
    assert len(run.said) == 2 and all("retrying in" in message for message in run.said)
    with refused(CheckpointError, "step 2", "3 times", varies=True):
        run.saver.wait_for_writes()
    assert names(folder) == ["step-000001"]


@BOTH_WAYS
def test_training_continues_with_a_warning_after_a_failed_save_if_so_configured(folder, fail, asynchronous):
    fail(FULL, FULL, FULL)
    run = Run(folder, asynchronous=asynchronous, on_failure="continue")
    for step in (1, 2, 3):
        train_and_save(run, step)
        wait_on_this_rank(run)
        assert not run.saver.has_failed
        run.saver.report_written()
    run.saver.wait_for_writes()
    first, *warnings, last = run.events
    assert [type(checkpoint) for checkpoint in (first, last)] == [SavedCheckpoint] * 2
    assert [first.step, last.step] == [1, 3]
    assert [step for step, _ in warnings] == [2, 2, 2]
    assert "Training continues with the next save." in warnings[-1][1]
    assert names(folder) == ["step-000001", "step-000003"]


@BOTH_WAYS
def test_a_state_that_is_not_finite_ends_the_run_even_if_it_continues_after_failures(folder, asynchronous):
    run = Run(folder, asynchronous=asynchronous, on_failure="continue")
    train_and_save(run, 1)
    with torch.no_grad():
        run.model[0].bias[2] = float("nan")
    with refused(NonFiniteError, "0.bias", "step-000001"):
        run.saver(Progress(step=2))
        wait_on_this_rank(run)
        assert run.saver.has_failed
        run.saver.wait_for_writes()
    assert names(folder) == ["step-000001"]


GB = 10**9


def test_a_save_preflight_leaves_no_files_and_does_not_change_training(folder):
    run, untouched = Run(folder), Run(folder)
    run.saver.rehearse(num_saves=5)
    assert list(folder.iterdir()) == []
    assert not run.optimizer.state
    for name, value in untouched.everything().items():
        assert torch.equal(run.everything()[name], value), name


def test_the_save_preflight_can_be_disabled(folder):
    Run(folder, rehearse=False).saver.rehearse(num_saves=5)
    assert not folder.exists()


def test_a_file_in_place_of_the_folder_is_found_before_the_first_step(folder):
    folder.write_text("not a folder")
    with refused(CheckpointError, folder, varies=True):
        Run(folder).saver.rehearse(num_saves=5)


def test_space_is_needed_for_all_that_are_kept_and_the_one_being_written(folder):
    (folder / "step-000001").mkdir(parents=True)
    with patch("finetune.checkpoint.write.saver.shutil.disk_usage") as usage:
        usage.return_value.free = 3 * GB
        require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=2), num_saves=9)
        with refused(CheckpointError, "3 more", "1.0 GB", "3.1 GB", "3.0 GB", "keep_last"):
            require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=3), num_saves=9)
        require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=50), num_saves=2)
        with refused(CheckpointError, "3 more"):
            require_space_for_saves(
                folder, size_bytes=GB, section=CheckpointSection(keep_best={"metric": "loss"}), num_saves=9
            )


def test_the_state_that_the_optimizer_will_make_is_counted_in(folder):
    sizes = []
    for run in (Run(folder), Run(folder).train(range(1), save=False)):
        with patch("finetune.checkpoint.write.saver.require_space_for_saves") as required:
            run.saver.rehearse(num_saves=5)
        sizes.append(required.call_args.kwargs["size_bytes"])
    trained = sum(each.numel() for each in run.model.parameters())
    assert sizes[0] == sizes[1] == 4 * 3 * trained + 4 * 2 * 4 + 8


def test_memory_is_counted_machine_by_machine():
    shares = [("a", 3 * GB, 10 * GB), ("a", 4 * GB, 9 * GB), ("b", 3 * GB, 20 * GB)]
    require_host_memory(shares)
    with refused(CheckpointError, "2 processes on a", "11.0 GB", "9.0 GB"):
        require_host_memory([*shares[:1], ("a", 8 * GB, 9 * GB), *shares[2:]])


def test_copies_that_have_no_room_are_refused_and_streaming_is_not(folder):
    with patch("finetune.checkpoint.write.saver.available_bytes", return_value=100):
        with refused(CheckpointError, "checkpoint.asynchronous: ", "1 process", varies=True):
            Run(folder).saver.rehearse(num_saves=5)
        Run(folder, asynchronous=False).saver.rehearse(num_saves=5)


def test_a_container_may_allow_less_memory_than_the_machine_has(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 3000
    assert available_bytes(tmp_path / "nowhere") > 3000
