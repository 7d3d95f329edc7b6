"""`finetune checkpoint prune`: what would go is said first, and what must stay always stays."""

import subprocess
import sys

import pytest

from finetune.commands.checkpoints.prune import parse_keep_best, prune
from finetune.errors import CheckpointError, UserError

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


def test_prune_deletes_nothing_unless_requested(five, capsys):
    assert pruned(five, keep_last=2, does_delete=False) == [2, 4, 6, 8, 10]
    assert "3 would be deleted, " in capsys.readouterr().out


def test_the_newest_the_every_and_the_best_stay(five, capsys):
    assert pruned(five, keep_last=1, keep_every=8, keep_best="loss") == [4, 8, 10]
    said = " ".join(capsys.readouterr().out.split())
    for reason in ("kept: best loss", "kept: every 8", "kept: newest good", "deleted 2, "):
        assert reason in said
    assert list((five / "checkpoints").glob(".*")) == []


def test_the_best_by_the_larger_value(five):
    assert pruned(five, keep_last=1, keep_best="loss:maximize:2") == [2, 8, 10]


def test_a_best_one_that_does_not_verify_gives_its_place_to_the_next(five, capsys):
    damage(five / "checkpoints" / "step-000004")
    assert pruned(five, keep_last=1, keep_best="loss") == [4, 6, 10]
    assert "kept: bad, not deleted" in capsys.readouterr().out


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
    (five / "resolved.yaml").write_text(text)
    assert pruned(five) == [6, 8, 10]
    assert "the checkpoint section's defaults" not in capsys.readouterr().out


def test_prune_names_its_defaults_when_the_run_has_no_settings(five, capsys):
    assert pruned(five) == [8, 10]
    assert "the checkpoint section's defaults" in capsys.readouterr().out


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
    code = "import sys; from pathlib import Path; from finetune.commands.checkpoints.prune import prune\n"
    code += "prune(Path(sys.argv[1]), keep_last=1, keep_every=None, keep_best=None, does_delete=True)\n"
    code += "print([name for name in ('torch', 'transformers', 'accelerate') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, str(five)], capture_output=True, text=True, check=True)
    assert steps(five) == [10]
    assert done.stdout.splitlines()[-1] == "[]"
