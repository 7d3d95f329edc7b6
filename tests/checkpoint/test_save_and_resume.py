import json
from shutil import copytree
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

from finetune.checkpoint.format.manifest import read_manifest
from finetune.errors import CheckpointError
from finetune.runtime.progress import Progress
from tests.checkpoint.small_run import Run, forge
from tests.refusals import refused


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def a_tensor_file(checkpoint):
    return checkpoint / "optimizer" / "00000.safetensors"


def test_a_resumed_run_ends_in_the_same_bits_as_one_that_never_stopped(folder):
    straight = Run(folder).train(range(3)).train(range(3, 6), save=False)
    resumed = Run(folder)
    assert resumed.resume() == Progress(3, num_tokens=20).state_dict()
    resumed.train(range(3, 6), save=False)
    assert len(straight.everything()) == 9 + 6 * 3  # 6 parameters, 3 buffers, AdamW's 3 words each
    assert resumed.everything().keys() == straight.everything().keys()
    for name, value in straight.everything().items():
        assert torch.equal(resumed.everything()[name], value), name


def test_a_checkpoint_is_plain_safetensors_and_json(folder):
    run = Run(folder).train(range(1))
    weights = load_file(folder / "step-000001" / "model" / "00000.safetensors")
    assert weights.keys() == run.model.state_dict().keys()
    moments = load_file(a_tensor_file(folder / "step-000001"))
    assert torch.equal(moments["0.weight/exp_avg"], run.optimizer.state[run.model[0].weight]["exp_avg"])
    scalars = json.loads((folder / "step-000001" / "scalars.json").read_text())
    assert scalars["optimizer"]["2.bias"] == {"step": 1.0}
    manifest = read_manifest(folder / "step-000001")
    on_disk = {str(path.relative_to(folder / "step-000001")) for path in folder.rglob("*") if path.is_file()}
    assert on_disk == {*manifest.files, "manifest.json"}


def test_before_the_first_step_there_is_no_optimizer_state_and_none_comes_back(folder):
    Run(folder).save(Progress(0))
    run, straight = Run(folder), Run(folder)
    run.resume()
    assert not run.optimizer.state
    for each in (run, straight):
        each.train(range(2), save=False)
    assert torch.equal(run.model[0].weight, straight.model[0].weight)


def test_saving_a_step_again_leaves_a_good_checkpoint_as_it_is(folder):
    run = Run(folder).train(range(1))
    written = (folder / "step-000001" / "manifest.json").stat().st_mtime_ns
    assert run.save(Progress(1)).path == folder / "step-000001"
    assert (folder / "step-000001" / "manifest.json").stat().st_mtime_ns == written


def test_saving_a_step_again_replaces_a_bad_checkpoint_and_keeps_it_aside(folder):
    run = Run(folder).train(range(1))
    (folder / "step-000001" / "progress.json").unlink()
    run.save(Progress(1))
    assert names(folder) == [".bad-step-000001", "step-000001"]
    assert "progress.json is missing" in run.said[0]


def truncate(checkpoint):
    path = a_tensor_file(checkpoint)
    path.write_bytes(path.read_bytes()[:-1])


def flip(checkpoint):
    path = a_tensor_file(checkpoint)
    values = bytearray(path.read_bytes())
    values[-5] ^= 1
    path.write_bytes(values)


def empty(checkpoint):
    for path in sorted(checkpoint.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGES = {
    "bytes instead of": truncate,
    "does not match its digest": flip,
    "00000.safetensors is missing": lambda checkpoint: a_tensor_file(checkpoint).unlink(),
    "was never finished": lambda checkpoint: (checkpoint / "manifest.json").unlink(),
    "cannot be read": lambda checkpoint: (checkpoint / "manifest.json").write_text('{"step": 3, '),
    "has no manifest.json": empty,
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name_and_set_aside(folder, reason):
    Run(folder, keep_last=3).train(range(3))
    DAMAGES[reason](folder / "step-000003")
    run = Run(folder)
    assert run.resume()["step"] == 2
    assert len(run.said) == 1 and "step-000003" in run.said[0] and reason in run.said[0]
    assert names(folder) == [".bad-step-000003", "step-000001", "step-000002"]


def test_a_run_with_only_bad_checkpoints_fails_instead_of_starting_over(folder):
    Run(folder).train(range(1))
    truncate(folder / "step-000001")
    for _ in range(2):  # also the second time, when a scheduler has started it again
        with refused(CheckpointError, ".bad-step-000001"):
            Run(folder).find()


def test_an_empty_run_folder_means_a_fresh_start(folder):
    assert Run(folder).find() is None


def test_the_staging_folder_of_a_killed_save_is_never_loaded_and_removed_by_the_next_save(folder):
    (folder / ".staging-step-000007" / "model").mkdir(parents=True)
    assert Run(folder).find() is None
    Run(folder).train(range(1))
    assert names(folder) == ["step-000001"]


def test_a_checkpoint_that_cannot_fit_is_refused_before_anything_is_written(folder):
    with patch("shutil.disk_usage") as usage, refused(CheckpointError, "1.0 kB"):
        usage.return_value.free = 1000
        Run(folder).train(range(1))
    assert names(folder) == []


def test_never_refuses_a_folder_with_checkpoints(folder):
    assert Run(folder, resume="never").find() is None
    Run(folder).train(range(1))
    with refused(CheckpointError, "`auto`"):
        Run(folder, resume="never").find()


def test_resuming_from_a_path_sets_later_checkpoints_aside(folder):
    Run(folder, keep_last=3).train(range(3))
    run = Run(folder, resume=str(folder / "step-000002"))
    assert run.resume()["step"] == 2
    assert names(folder) == [".superseded-step-000003", "step-000001", "step-000002"]


def test_a_path_of_another_run_is_refused_where_this_one_has_checkpoints(folder, tmp_path):
    Run(tmp_path / "other").train(range(1))
    path = str(tmp_path / "other" / "step-000001")
    assert Run(folder, resume=path).resume()["step"] == 1
    Run(folder).train(range(1))
    with refused(CheckpointError, path):
        Run(folder, resume=path).find()


@pytest.mark.parametrize("path", ["checkpoints", "nowhere"])
def test_a_resume_path_that_is_not_a_checkpoint_is_an_error(folder, tmp_path, path):
    Run(folder).train(range(1))
    with refused(CheckpointError, "checkpoint.resume: ", tmp_path / path):
        Run(folder, resume=str(tmp_path / path)).find()


def test_a_damaged_checkpoint_asked_for_by_path_is_an_error_and_stays_where_it_is(folder):
    Run(folder).train(range(2))
    flip(folder / "step-000002")
    with refused(CheckpointError, "checkpoint.resume: ", "step-000002"):
        Run(folder, resume=str(folder / "step-000002")).find()
    assert names(folder) == ["step-000001", "step-000002"]


def test_another_runs_identity_is_refused_by_name(folder):
    Run(folder).train(range(1))
    with refused(CheckpointError, "data: abc", "xyz", "extra: "):
        Run(folder, identity={"model": "small", "data": "xyz", "extra": "1"}).resume()


def test_another_shape_is_refused_by_name(folder):
    Run(folder).train(range(1))
    with refused(CheckpointError, "0.weight", "[4, 3]", "[5, 3]"):
        Run(folder, width=5).resume()


def test_another_optimizer_is_rejected_with_the_missing_state(folder):
    Run(folder).train(range(1))
    run = Run(folder)
    run.access._optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    with refused(CheckpointError, "0.weight/momentum_buffer", "0.weight/exp_avg"):
        run.resume()


def test_a_parameter_that_was_never_updated_comes_back_without_state(folder):
    run = Run(folder)
    run.model[2].bias.requires_grad_(True)
    run.model[2](torch.randn(2, 4)).sum().backward()
    run.optimizer.step()  # the first layer has had no gradient
    run.save(Progress(1))
    resumed = Run(folder)
    resumed.resume()
    assert len(resumed.optimizer.state) == 2
    assert resumed.optimizer.state[resumed.model[2].bias]["step"] == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "model/../../x", "a\\..\\b", "", "manifest.json"])
def test_a_manifest_that_points_elsewhere_is_not_trusted(folder, name):
    Run(folder).train(range(1))
    stranger = {name: {"size_bytes": 1, "sha256": "0" * 64}}
    forge(folder / "step-000001", "manifest.json", lambda value: value | {"files": value["files"] | stranger})
    with refused(CheckpointError, repr(name)):
        read_manifest(folder / "step-000001")


def test_a_link_in_place_of_a_file_is_not_followed(folder, tmp_path):
    Run(folder).train(range(1))
    path = a_tensor_file(folder / "step-000001")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with refused(CheckpointError, ".bad-step-000001"):
        Run(folder).find()


def newer(checkpoint):
    forge(checkpoint, "manifest.json", lambda value: value | {"format_version": 3, "versions": {"finetune": "9.1.0"}})


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_checkpoint_of_a_newer_format_is_refused_and_stays_where_it_is(folder, resume):
    Run(folder, keep_last=3).train(range(3))
    newer(folder / "step-000003")
    section = {} if resume == "auto" else {"resume": str(folder / "step-000003")}
    with refused(CheckpointError, "format 3", "9.1.0", "format 2"):
        Run(folder, **section).find()
    assert names(folder) == ["step-000001", "step-000002", "step-000003"]


def test_a_number_of_format_that_has_been_damaged_is_damage_and_no_newer_format(folder):
    Run(folder, keep_last=3).train(range(2))
    path = folder / "step-000002" / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    run = Run(folder)
    assert run.resume()["step"] == 1
    assert "manifest.json: does not match its digest" in run.said[0]


def test_a_manifest_from_before_manifests_had_a_digest_is_read(folder):
    Run(folder).train(range(1))
    path = folder / "step-000001" / "manifest.json"
    value = json.loads(path.read_text())
    del value["sha256"]
    path.write_text(json.dumps(value))
    assert Run(folder).resume()["step"] == 1


FORGED = {
    "index": ("index.json", lambda value: []),
    "an entry of the index": ("index.json", lambda value: value | {next(iter(value)): 3}),
    "a shape": ("index.json", lambda value: {k: v | {"shape": [10**18, 10**18]} for k, v in value.items()}),
    "a file of a tensor": ("index.json", lambda value: {k: v | {"file": "../x"} for k, v in value.items()}),
    "a name of a tensor": ("index.json", lambda value: {f"{k}x": v for k, v in value.items()}),
    "a missing tensor": ("index.json", lambda value: dict(list(value.items())[1:])),
    "a type": ("index.json", lambda value: {k: v | {"dtype": "I32"} for k, v in value.items()}),
    "scalars": ("scalars.json", lambda value: value | {"optimizer": {"0.weight": {"step": "3"}}}),
    "another scalar": ("scalars.json", lambda value: value | {"more": 1}),
    "a field of the progress": ("progress.json", lambda value: value | {"steq": 1}),
    "a missing field of the progress": ("progress.json", lambda value: {"version": value["version"], "step": 3}),
    "a count": ("progress.json", lambda value: value | {"num_tokens": -1}),
    "a flag for a count": ("progress.json", lambda value: value | {"num_tokens": True}),
    "text for a count": ("progress.json", lambda value: value | {"num_tokens": "10"}),
    "a step beyond reason": ("progress.json", lambda value: value | {"step": 10**18}),
    "a step of the manifest beyond reason": ("manifest.json", lambda value: value | {"step": 10**18}),
    "another step": ("progress.json", lambda value: value | {"step": 2}),
    "another step in the manifest": ("manifest.json", lambda value: value | {"step": 2}),
    "a manifest without an index": (
        "manifest.json",
        lambda value: value | {"files": {k: v for k, v in value["files"].items() if k != "index.json"}},
    ),
    "a date": ("manifest.json", lambda value: value | {"created": 1e300}),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_checkpoint_with_valid_digests_and_invalid_content_is_set_aside(folder, what):
    Run(folder, keep_last=3).train(range(3))
    forge(folder / "step-000003", *FORGED[what])
    run = Run(folder)
    assert run.resume()["step"] == 2
    assert names(folder) == [".bad-step-000003", "step-000001", "step-000002"]
    assert "skipped step-000003" in run.said[0]


def test_a_progress_file_of_another_version_is_not_treated_as_damage(folder):
    Run(folder, keep_last=3).train(range(2))
    forge(folder / "step-000002", "progress.json", lambda value: value | {"version": 99})
    with refused(CheckpointError, "version 99"):
        Run(folder).find()
    assert names(folder) == ["step-000001", "step-000002"]


def test_names_that_are_nearly_a_checkpoints_are_left_alone(folder):
    Run(folder, keep_last=3).train(range(2))
    others = ["step-0000002", "step-000002 (copy)", "step-1e5", "step-99999999999999999999", "step-٠٠٠٠٠٩"]
    for name in others:
        copytree(folder / "step-000002", folder / name)
    (folder / "step-000008").symlink_to("nowhere")
    (folder / "step-000009").write_text("a file")
    run = Run(folder)
    assert run.resume()["step"] == 2 and not run.said
    assert names(folder) == sorted(["step-000001", "step-000002", "step-000008", "step-000009", *others])


def test_a_checkpoint_may_be_a_link_and_only_the_link_is_ever_renamed_or_deleted(folder, tmp_path):
    Run(folder, keep_last=4).train(range(4))
    for step in (1, 2, 3, 4):
        (folder / f"step-00000{step}").rename(tmp_path / f"elsewhere-{step}")
        (folder / f"step-00000{step}").symlink_to(tmp_path / f"elsewhere-{step}")
    flip(tmp_path / "elsewhere-4")
    run = Run(folder, keep_last=2)
    assert run.resume()["step"] == 3
    assert (folder / ".bad-step-000004").is_symlink()
    run.train([3])
    assert names(folder) == [".bad-step-000004", "step-000003", "step-000004"]
    assert (folder / "step-000003").is_symlink()
    assert names(tmp_path) == ["checkpoints", *(f"elsewhere-{step}" for step in (1, 2, 3, 4))]


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), lambda path: path.write_text("")])
def test_a_file_or_folder_at_the_path_of_a_new_checkpoint_is_set_aside(folder, make):
    Run(folder).train(range(1))
    make(folder / "step-000002")
    Run(folder).train([1])
    assert names(folder) == [".bad-step-000002", "step-000001", "step-000002"]
