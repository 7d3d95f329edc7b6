"""Whatever happens to a file of a checkpoint: it is used unharmed or set aside, at once, and never a traceback."""

import hashlib
import json
import os
import random
import shutil
import time
from collections import Counter

import pytest
import torch

from finetune.checkpoint.format.manifest import OtherFormatError
from finetune.checkpoint.read.inventory import find_problems, read_entry
from finetune.errors import CheckpointError
from tests.checkpoint.small_run import Run, forge

FILES = (
    *("manifest.json", "index.json", "scalars.json", "progress.json"),
    *("model/00000.safetensors", "optimizer/00000.safetensors"),
)
TEXTS = FILES[:4]

VALUES = (
    *([], {}, None, True, -1, 0, 10**18, 10**400, 1.5, 1e308, float("nan"), "", "x", "../x", "\ud800", [[[]]]),
    *({"step": "1"}, {"": None}, "0" * 64, 2**63, -(10**18), ["a"] * 100, "9" * 5000),
)
"""What takes the place of something in a JSON file."""

NESTED = b"[" * 200_000
SECONDS = 5.0  # a second, on a machine that does nothing else
NUM_CASES = int(os.environ.get("FINETUNE_DAMAGE_CASES", "100"))


def flip(path, dice):
    content = bytearray(path.read_bytes())
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    path.write_bytes(content)


def truncate(path, dice):
    path.write_bytes(path.read_bytes()[: dice.randrange(path.stat().st_size)])


def extend(path, dice):
    path.write_bytes(path.read_bytes() + dice.randbytes(dice.randrange(1, 100)))


def replace(path, dice):
    whole = (b"[]", b"{}", b"null", b"3", b'"x"', b"", b"\x00" * 64, NESTED, b"1" * 10_000, b"\xff\xfe{}")
    path.write_bytes(dice.choice(whole))


def remove(path, dice):
    path.unlink()


def make_folder(path, dice):
    path.unlink()
    path.mkdir()


def make_link(path, dice):
    path.unlink()
    path.symlink_to(dice.choice(["/etc/passwd", "nowhere", "/dev/zero", str(path), ".."]))


def make_pipe(path, dice):
    path.unlink()
    os.mkfifo(path)


DAMAGES = (flip, flip, flip, truncate, extend, replace, replace, remove, make_folder, make_link, make_pipe)


def forge_value(checkpoint, name, dice):
    """Replace, take away or add something somewhere in a JSON file, and put all digests right."""

    def change(value):
        place, key = value, dice.choice(list(value))
        while isinstance(place[key], dict) and place[key] and dice.random() < 0.7:
            place, key = place[key], dice.choice(list(place[key]))
        if dice.random() < 0.2:
            place[f"{key}x"] = place.pop(key)
        else:
            place[key] = dice.choice(VALUES)
        return value if dice.random() < 0.95 else dice.choice(VALUES)

    forge(checkpoint, name, change)


def forge_bytes(checkpoint, name, dice):
    """Damage a file, and put its digest right."""
    dice.choice((flip, truncate, extend, replace))(checkpoint / name, dice)
    value = json.loads((checkpoint / "manifest.json").read_text())
    forge(checkpoint, "manifest.json", lambda _: value | {"files": value["files"] | {name: facts(checkpoint / name)}})


def facts(path):
    content = path.read_bytes()
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 3, and what is in the newer one."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    return folder, Run(folder, keep_last=2).train(range(3)).everything()


def outcome_of(folder, everything):
    """Return what has become of the newest checkpoint: `used`, `aside` or `refused`; all else fails."""
    newest = folder / "step-000003"
    is_good = not find_problems(read_entry(newest), read_all=True)
    run, started = Run(folder), time.monotonic()
    try:
        step = run.resume()["step"]
    except OtherFormatError:
        assert newest.exists() and not is_good
        return "refused"
    except CheckpointError as error:  # whole, and of another model
        assert everything is None and is_good
        assert "does not match the state that this run trains" in str(error) or "other training settings" in str(error)
        return "refused"
    finally:
        assert time.monotonic() - started < SECONDS
    assert is_good == (step == 3), "what `checkpoint verify` says is what a run does"
    if step == 3:
        found = run.everything() if everything is not None else {}
        everything = everything or {}
        assert found.keys() == everything.keys()
        assert all(torch.equal(found[name], everything[name]) for name in found)
        return "used"
    assert step == 2 and len(run.said) == 1 and not newest.exists()
    return "aside"


@pytest.mark.full
def test_a_damaged_file_is_never_used_never_a_traceback_and_never_waited_for(good, tmp_path):
    folder, everything = good
    outcomes = Counter()
    for number in range(NUM_CASES):
        dice, copy = random.Random(number), tmp_path / "checkpoints"
        shutil.copytree(folder, copy)
        name, damage = dice.choice(FILES), dice.choice(DAMAGES)
        damage(copy / "step-000003" / name, dice)
        outcomes[outcome_of(copy, everything)] += 1
        shutil.rmtree(copy)
    assert sum(outcomes.values()) == NUM_CASES and outcomes["refused"] == 0
    assert outcomes["aside"] > 0.9 * NUM_CASES


@pytest.mark.full
def test_a_tampered_checkpoint_with_valid_digests_is_loaded_correctly_or_rejected(good, tmp_path):
    folder, _ = good
    outcomes = Counter()
    for number in range(NUM_CASES):
        dice, copy = random.Random(number), tmp_path / "checkpoints"
        shutil.copytree(folder, copy)
        if dice.random() < 0.3:
            forge_bytes(copy / "step-000003", dice.choice(FILES[1:]), dice)
        else:
            forge_value(copy / "step-000003", dice.choice(TEXTS), dice)
        try:
            outcomes[outcome_of(copy, None)] += 1  # other numbers with good digests are the state: a stranger's right
        except Exception as error:
            raise AssertionError(f"case {number}: {error!r}") from error
        shutil.rmtree(copy)
    assert outcomes["aside"] > 0.5 * NUM_CASES and outcomes["refused"] > 0
