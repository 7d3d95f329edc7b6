"""`finetune checkpoint ls, show, verify, prune`: their output, and that what must stay always stays."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from finetune.checkpoint.format.manifest import MANIFEST_DIGEST_KEY, file_checksum, manifest_digest
from finetune.commands.checkpoints import (
    list_checkpoints,
    parse_keep_best,
    prune,
    show_checkpoint,
    verify_checkpoints,
)
from finetune.errors import CheckpointError, UserError


def forge(checkpoint, name, change):
    """Change a file of the checkpoint as somebody does who knows of the digests, and puts them right again."""
    path, manifest = checkpoint / name, checkpoint / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    value = json.loads(manifest.read_text())
    if name != "manifest.json":
        value["files"][name] = asdict(file_checksum(path))
    manifest.write_text(json.dumps(value | {MANIFEST_DIGEST_KEY: manifest_digest(value)}))


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.fixture
def listed(run, capsys):
    """Return what `ls --json` says of the run."""

    def ask(*, verifies=False):
        list_checkpoints(run, verifies=verifies, as_json=True)
        return json.loads(capsys.readouterr().out)

    return ask


def test_every_checkpoint_has_a_row(run, write, capsys):
    write(4, metrics={"loss": 1.25, "exact_match": 0.5})
    write(8)
    list_checkpoints(run, verifies=False, as_json=False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == ["step", "size", "age", "metrics", "written", "by", "state"]
    assert lines[2][0] == "4"
    assert lines[2][-8:] == ["1", "min", "loss", "1.25,", "exact_match", "0.5", "zero3:4", "good"]
    assert lines[3][0] == "8"
    assert lines[3][-3:] == ["-", "zero3:4", "good"]


@pytest.mark.parametrize("width", ["40", "60", "200"])
def test_step_and_state_are_read_at_any_width(run, write, capsys, monkeypatch, width):
    write(4, metrics={"loss": 1.25, "exact_match": 0.5, "token_accuracy": 0.75})
    monkeypatch.setenv("COLUMNS", width)
    list_checkpoints(run, verifies=False, as_json=False)
    table = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("Only sizes")]
    assert max(len(line) for line in table) <= int(width)
    assert any(" 4 " in line and "good" in line for line in table)


def test_the_quick_check_finds_missing_and_truncated_files(write, listed):
    (write(4) / "scalars.json").unlink()
    (write(8) / "manifest.json").unlink()
    with (write(12) / "model" / "00000.safetensors").open("r+b") as file:
        file.truncate(50)
    write(16)
    found = {each["step"]: each["problems"] for each in listed()["checkpoints"]}
    assert found[4] == ["scalars.json is missing"]
    assert found[8] == ["has no manifest.json, so the checkpoint was never finished"]
    assert found[12][0].startswith("model/00000.safetensors has 50 bytes instead of ")
    assert found[16] == []


def test_a_flipped_byte_is_found_by_reading_alone(write, listed):
    flip_last_byte(write(4) / "model" / "00000.safetensors")
    assert listed()["checkpoints"][0]["is_good"]
    (bad,) = listed(verifies=True)["checkpoints"]
    assert bad["problems"] == ["model/00000.safetensors does not match its digest"]


def test_a_folder_under_another_steps_name_is_bad(run, write, listed):
    write(4).rename(run / "checkpoints" / "step-000006")
    assert listed()["checkpoints"][0]["problems"] == ["the folder is named step 6, but its manifest says step 4"]


def test_the_quick_check_reads_every_file_except_tensors(write, listed, capsys):
    progress = write(4) / "progress.json"
    content = bytearray(progress.read_bytes())
    content[10] ^= 1
    progress.write_bytes(content)
    forge(write(8), "progress.json", lambda value: value | {"step": 10**18})
    forge(write(12), "index.json", lambda value: [])
    forge(write(16), "manifest.json", lambda value: value | {"format_version": 3, "versions": {"finetune": "9.1.0"}})
    found = {each["step"]: each["problems"][0] for each in listed()["checkpoints"]}
    assert found[4] == "progress.json does not match its digest"
    assert found[8].startswith("progress.json is invalid: step:")
    assert found[12].startswith("index.json is invalid:")
    assert "format 3, written by finetune 9.1.0" in found[16]
    assert not verify_checkpoints(write(20).parent, step=None)
    assert "step-000008: BAD\n  progress.json is invalid" in capsys.readouterr().out


def test_a_folder_that_is_nearly_called_a_checkpoint_is_named_as_none(run, write, listed):
    shutil.copytree(write(4), run / "checkpoints" / "step-000004 (copy)")
    (beside,) = listed()["leftovers"]
    assert beside["path"].endswith("step-000004 (copy)") and beside["meaning"].startswith("is not a checkpoint")
    assert [each["step"] for each in listed()["checkpoints"]] == [4]


def test_hidden_folders_next_to_checkpoints_are_listed_with_their_meaning(run, write, listed, capsys):
    write(4)
    write(8).rename(run / "checkpoints" / ".bad-step-000008")
    (run / "checkpoints" / ".staging-step-000012").mkdir()
    beside = {each["path"].rpartition("/")[2]: each["meaning"] for each in listed()["leftovers"]}
    assert beside == {
        ".bad-step-000008": "failed verification and was renamed",
        ".staging-step-000012": "is being written, or its writer was killed",
    }
    list_checkpoints(run, verifies=False, as_json=False)
    assert "  .bad-step-000008 (" in capsys.readouterr().out


def test_show_prints_digests_origin_and_tensors_by_type(run, write, capsys):
    write(4)
    write(8)
    show_checkpoint(run, step=None)
    printed = " ".join(capsys.readouterr().out.split())
    for fact in ("step 8", "state digest 57a7e", "samples digest 5a3e", "by zero3:4", "5 files "):
        assert fact in printed
    for kind in ("parameter", "exp_avg"):
        assert f"{kind} 1 tensor, 12 elements, F32" in printed


def test_verify_names_the_file(run, write, capsys):
    flip_last_byte(write(4) / "optimizer" / "00000.safetensors")
    write(8)
    assert not verify_checkpoints(run, step=None)
    said = capsys.readouterr().out
    assert "step-000004: BAD" in said
    assert "optimizer/00000.safetensors does not match its digest" in said
    assert "step-000008: good, 5 files" in said
    assert verify_checkpoints(run, step=8)


def test_a_folder_without_checkpoints_is_named(run, tmp_path, listed):
    assert listed()["checkpoints"] == []
    with pytest.raises(UserError, match="not a run with checkpoints"):
        list_checkpoints(tmp_path, verifies=False, as_json=False)
    with pytest.raises(UserError, match="no such folder"):
        list_checkpoints(tmp_path / "nowhere", verifies=False, as_json=False)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run, write):
    write(4)
    write(8)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 5\. Available: 4, 8"):
        show_checkpoint(run, step=5)
    with pytest.raises(UserError, match="is a single checkpoint"):
        show_checkpoint(run / "checkpoints" / "step-000004", step=8)


HOLD = "import sys; from pathlib import Path; from finetune.runtime.run_folder import lock_run_folder\n"
HOLD += "with lock_run_folder(Path(sys.argv[1]), log=print): print('held', flush=True); sys.stdin.read()"


def steps(run):
    return sorted(int(path.name[-6:]) for path in (run / "checkpoints").glob("step-*"))


def pruned(run, *, does_delete=True, keep_last=None, keep_every=None, keep_best=None):
    prune(run, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best, does_delete=does_delete)
    return steps(run)


def damage(path):
    weights = path / "model" / "00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")


@pytest.fixture
def five(run, write):
    """A run with checkpoints of steps 2, 4, 6, 8 and 10; the best loss is that of step 4."""
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.5), (10, float("nan"))):
        write(step, metrics={"loss": loss})
    return run


@pytest.mark.parametrize(
    ("damaged", "keeps", "left", "said"),
    [
        (None, {"keep_last": 2, "does_delete": False}, [2, 4, 6, 8, 10], ["3 would be deleted, "]),
        (
            None,
            {"keep_last": 1, "keep_every": 8, "keep_best": "loss"},
            [4, 8, 10],
            ["kept: best loss", "kept: every 8", "kept: newest good", "deleted 2, "],
        ),
        (None, {"keep_last": 1, "keep_best": "loss:maximize:2"}, [2, 8, 10], []),
        ("step-000004", {"keep_last": 1, "keep_best": "loss"}, [4, 6, 10], ["kept: bad, not deleted"]),
    ],
)
def test_the_newest_the_every_and_the_best_that_verify_stay(five, capsys, damaged, keeps, left, said):
    if damaged is not None:
        damage(five / "checkpoints" / damaged)
    assert pruned(five, **keeps) == left
    printed = " ".join(capsys.readouterr().out.split())
    assert [reason for reason in said if reason not in printed] == []
    assert list((five / "checkpoints").glob(".*")) == []


def test_prune_removes_partially_deleted_checkpoints(five):
    (five / "checkpoints" / ".deleted-step-000001" / "model").mkdir(parents=True)
    pruned(five, keep_last=5, does_delete=False)
    assert [path.name for path in (five / "checkpoints").glob(".*")] == [".deleted-step-000001"]
    assert pruned(five, keep_last=5) == [2, 4, 6, 8, 10]
    assert list((five / "checkpoints").glob(".*")) == []


def test_prune_options_default_to_the_settings_of_the_run(five, capsys):
    text = "checkpoint: {keep_last: 3}\nrun: {folder: /nowhere}\nmodel: {name: gpt2}\ntask: {name: sft}\n"
    text += "data: {train: {path: /gone.jsonl}, max_length: 8}\n"
    text += "train: {global_batch_size: 8, microbatch_size: 4, steps: 10, learning_rate: 0.1}\n"
    prune(five, keep_last=None, keep_every=None, keep_best=None, does_delete=False)
    assert "the checkpoint section's defaults" in capsys.readouterr().out
    (five / "resolved.yaml").write_text(text)
    assert pruned(five) == [6, 8, 10]
    assert "the checkpoint section's defaults" not in capsys.readouterr().out


def test_the_newest_good_one_stays_though_newer_bad_ones_count_as_last(five, capsys):
    damage(five / "checkpoints" / "step-000010")
    (five / "checkpoints" / "step-000008" / "manifest.json").unlink()
    assert pruned(five, keep_last=1) == [6, 8, 10]
    said = capsys.readouterr().out
    assert said.count("kept: bad, not deleted") == 2
    assert "kept: newest good" in said


def test_prune_deletes_nothing_without_a_valid_checkpoint(run, write):
    damage(write(2))
    damage(write(4))
    with pytest.raises(CheckpointError, match="none is deleted"):
        pruned(run, keep_last=1)
    assert steps(run) == [2, 4]


def test_a_folder_that_a_run_is_writing_is_left_alone(five):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(five)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert pruned(five, keep_last=1, does_delete=False) == [2, 4, 6, 8, 10]  # to look is always allowed
        with pytest.raises(UserError, match=f"is being written by process {holder.pid}"):
            pruned(five, keep_last=1)
    finally:
        holder.communicate("")
    assert pruned(five, keep_last=1) == [10]


@pytest.mark.parametrize("written", ["", "loss:0", "loss:best", "loss:minimize:2:3", ":2"])
def test_an_invalid_keep_best_option_is_rejected(written):
    with pytest.raises(UserError, match="--keep-best"):
        parse_keep_best(written)


def test_pruning_needs_no_torch(five):
    code = "import sys; from pathlib import Path; from finetune.commands.checkpoints import prune\n"
    code += "prune(Path(sys.argv[1]), keep_last=1, keep_every=None, keep_best=None, does_delete=True)\n"
    code += "print([name for name in ('torch', 'transformers', 'accelerate') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, str(five)], capture_output=True, text=True, check=True)
    assert steps(five) == [10]
    assert done.stdout.splitlines()[-1] == "[]"
