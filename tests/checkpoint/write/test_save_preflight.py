import json
import os
import subprocess
from unittest.mock import patch

import pytest
import torch

from finetune.checkpoint.sharding.optimizer_state import expected_state_keys
from finetune.checkpoint.write.save_preflight import require_host_memory, require_space_for_saves
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.errors import CheckpointError
from finetune.runtime.resources import available_bytes
from tests.checkpoint.small_run import Run

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
    with pytest.raises(CheckpointError, match=r"cannot write .*checkpoints"):
        Run(folder).saver.rehearse(num_saves=5)


def test_space_is_needed_for_all_that_are_kept_and_the_one_being_written(folder):
    (folder / "step-000001").mkdir(parents=True)
    with patch("finetune.checkpoint.write.save_preflight.shutil.disk_usage") as usage:
        usage.return_value.free = 3 * GB
        require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=2), num_saves=9)
        with pytest.raises(CheckpointError, match=r"3 more .* of 1.0 GB need 3.1 GB.*3.0 GB are free.*keep_last"):
            require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=3), num_saves=9)
        require_space_for_saves(folder, size_bytes=GB, section=CheckpointSection(keep_last=50), num_saves=2)
        with pytest.raises(CheckpointError, match=r"3 more checkpoints"):
            require_space_for_saves(
                folder, size_bytes=GB, section=CheckpointSection(keep_best={"metric": "loss"}), num_saves=9
            )


def test_the_state_that_the_optimizer_will_make_is_counted_in(folder):
    sizes = []
    for run in (Run(folder), Run(folder).train(range(1), save=False)):
        with patch("finetune.checkpoint.write.save_preflight.require_space_for_saves") as required:
            run.saver.rehearse(num_saves=5)
        sizes.append(required.call_args.kwargs["size_bytes"])
    trained = sum(each.numel() for each in run.model.parameters())
    assert sizes[0] == sizes[1] == 4 * 3 * trained + 4 * 2 * 4 + 8


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
        torch.optim.SGD,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.NAdam,
        torch.optim.RAdam,
    ],
)
def test_optimizer_state_is_predicted_before_the_first_step(optimizer):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    made = optimizer([weight])
    expected = expected_state_keys(made)
    weight.grad = torch.ones(3, 2)
    made.step()
    kept = [key for key, value in made.state[weight].items() if getattr(value, "shape", None) == weight.shape]
    assert sorted(kept) == sorted(expected)


def test_memory_is_counted_machine_by_machine():
    shares = [("a", 3 * GB, 10 * GB), ("a", 4 * GB, 9 * GB), ("b", 3 * GB, 20 * GB)]
    require_host_memory(shares)
    with pytest.raises(CheckpointError, match=r"2 processes on a need 11.0 GB .*9.0 GB are.*asynchronous: false"):
        require_host_memory([*shares[:1], ("a", 8 * GB, 9 * GB), *shares[2:]])


def test_copies_that_have_no_room_are_refused_and_streaming_is_not(folder):
    with patch("finetune.checkpoint.write.save_preflight.available_bytes", return_value=100):
        with pytest.raises(CheckpointError, match=r"checkpoint\.asynchronous: the copies of 1 process"):
            Run(folder).saver.rehearse(num_saves=5)
        Run(folder, asynchronous=False).saver.rehearse(num_saves=5)


def test_a_container_may_allow_less_memory_than_the_machine_has(tmp_path):
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_bytes(tmp_path) == 3000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > 3000
    assert available_bytes(tmp_path / "nowhere") > 3000


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_that_is_full_for_real_ends_in_a_clear_error_with_the_old_checkpoints_whole(small_disk, fail):
    fail()  # no faults: the disk itself; tries follow one another at once
    folder = small_disk / "checkpoints"
    with (
        patch("finetune.checkpoint.write.writer.SLACK_BYTES", 0),
        patch("finetune.checkpoint.write.save_preflight.SLACK_BYTES", 0),
    ):
        run = Run(folder, width=16384).train(range(1))  # 1.5 MB, so the next does not fit beside it
        with pytest.raises(CheckpointError, match=r"needs 1\.\d MB, but \d+\.\d kB are free .*Free disk space"):
            run.train(range(1, 2))
        with (
            patch("finetune.checkpoint.write.writer.require_disk_space"),
            pytest.raises(CheckpointError, match=r"No space left.*Free disk space"),
        ):
            run.train(range(1, 2))
        with pytest.raises(CheckpointError, match="2 more checkpoints"):
            run.saver.rehearse(num_saves=5)
    assert [path.name for path in folder.iterdir()] == ["step-000001"]
    assert Run(folder, width=16384).find().step == 1
    assert json.loads((folder / "step-000001" / "progress.json").read_text())["step"] == 1
