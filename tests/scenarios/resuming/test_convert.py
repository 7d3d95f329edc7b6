"""Portable to Accelerate's own folder and back: the same state, bit by bit, under every strategy."""

import shutil
import sys
from types import SimpleNamespace

import pytest
from torch import equal, ones, save
from torch.distributed.checkpoint.api import CheckpointException

from finetune.checkpoint.read.load import open_checkpoint
from finetune.commands import convert
from finetune.commands.convert import convert_from, convert_to, require_accelerate_folder, require_intact_archives
from finetune.errors import CheckpointError, UserError
from finetune.strategy.protocol import Expected
from tests import launching

PROGRAM = "tests.scenarios.resuming.convert_program"
QUICK = ["evaluate=null", "data.validation=null", "train.steps=4", "checkpoint.every_steps=4"]
KINDS = {"full": QUICK, "lora": [*QUICK, "model.lora={rank: 4, alpha: 8}"]}
LAUNCHES = [
    ("fsdp2", 2, "optimizer_0/.metadata"),
    ("zero2", 2, "pytorch_model/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("zero3", 2, "pytorch_model/zero_pp_rank_1_mp_rank_00_model_states.pt"),
    pytest.param("ddp", 2, "optimizer.bin", marks=pytest.mark.full),
    pytest.param("fsdp1", 2, "optimizer_0/.metadata", marks=pytest.mark.full),
    pytest.param("hsdp", 4, "optimizer_0/.metadata", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def runs(launch):
    """Finished runs by kind, each with one checkpoint, that of step 4."""
    ended = {kind: launch(None, name=f"convert-{kind}", overrides=overrides) for kind, overrides in KINDS.items()}
    for run in ended.values():
        assert run.code == 0, run.output
    return {kind: run.folder for kind, run in ended.items()}


def emptied(run, folder):
    """Copy the run without its checkpoints."""
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("step-*"))


def started(command, log):
    return launching.run(command, log=log, timeout_seconds=540), log.read_text(errors="replace")


def converted(log, *words):
    """Type `finetune checkpoint convert WORDS` on one process."""
    return started([sys.executable, "-m", "finetune", "checkpoint", "convert", *map(str, words)], log)


def state(run):
    opened = open_checkpoint(run / "checkpoints" / "step-000004")
    return opened, {name: opened.read(name) for name in opened.records}


def assert_same_state(run, other):
    (there, tensors), (here, again) = state(run), state(other)
    assert len(tensors) > 10
    assert here.records == there.records
    assert here.scalars == there.scalars
    assert [name for name in tensors if not equal(tensors[name], again[name])] == []
    assert here.verified.manifest.state_sha256 == there.verified.manifest.state_sha256
    return there.progress, here.progress


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "processes", "own_file"), LAUNCHES)
def test_there_and_back_is_the_same_state(runs, tmp_path, strategy, processes, own_file):
    words = [(run, tmp_path / kind, emptied(run, tmp_path / f"{kind}-back")) for kind, run in runs.items()]
    paths = [str(word) for triple in words for word in triple]
    command = launching.accelerate_command(strategy, "-m", PROGRAM, *paths, processes=processes)
    code, output = started(command, tmp_path / "log")
    assert code == 0, output
    for run, folder, back in words:
        assert (folder / own_file).is_file()
        before, after = assert_same_state(run, back)
        assert after == before
        origin = open_checkpoint(back / "checkpoints" / "step-000004").verified.manifest.run.origin
        assert origin == {"strategy": strategy, "processes": str(processes)}


@pytest.mark.full
@pytest.mark.distributed
def test_a_foreign_folder_gets_its_data_position_from_the_given_step(runs, tmp_path):
    folder, back = tmp_path / "folder", emptied(runs["full"], tmp_path / "back")
    code, output = converted(tmp_path / "to.log", runs["full"], "--to", folder)
    assert code == 0, output
    assert "does not contain the data position" in output
    (folder / "progress.json").unlink()  # as Accelerate itself would have left it
    code, output = converted(tmp_path / "wrong.log", back, "--from", folder, "--step", 3)
    assert code == 2
    assert "its optimizer has taken 4 steps, so this is not the state after step 3" in output
    assert "Traceback" not in output
    code, output = converted(tmp_path / "from.log", back, "--from", folder, "--step", 4)
    assert code == 0, output
    before, after = assert_same_state(runs["full"], back)
    assert (after["step"], after["samples_sha256"]) == (4, before["samples_sha256"])
    assert before["num_tokens"] > after["num_tokens"] == 0


@pytest.mark.full
@pytest.mark.distributed
def test_convert_never_overwrites_an_existing_checkpoint(runs, tmp_path):
    with pytest.raises(UserError, match="already exists"):
        convert_to(runs["full"], tmp_path, step=None)
    with pytest.raises(UserError, match="step-000004 already exists"):
        convert_from(runs["full"], tmp_path, step=4)


class Launched:
    """A strategy that expects something."""

    def __init__(self, name, **expected):
        self.name = name
        self.expected = Expected(distributed_types=(), num_processes=2, **expected)


@pytest.mark.parametrize(
    ("strategy", "missing"),
    [
        (Launched("ddp"), "has no model.safetensors"),
        (Launched("fsdp2", fsdp_version=2), "has neither pytorch_model_fsdp_0/ and optimizer_0/ nor"),
        (Launched("zero2", zero_stage=2), "has the optimizer state of 1 ZeRO processes"),
    ],
    ids=lambda each: getattr(each, "name", None),
)
def test_an_accelerate_folder_of_another_strategy_or_world_size_is_rejected_with_its_missing_files(
    tmp_path, strategy, missing
):
    (tmp_path / "pytorch_model").mkdir()
    (tmp_path / "pytorch_model" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "optimizer.bin").touch()
    with pytest.raises(CheckpointError, match=missing) as refusal:
        require_accelerate_folder(tmp_path, strategy=strategy, world=2)
    assert f"not written under {strategy.name} with 2 processes" in str(refusal.value)


def test_a_damaged_accelerate_folder_is_one_message(tmp_path):
    assert not issubclass(CheckpointException, Exception)

    def load_state(folder):
        raise CheckpointException("load", {0: (ValueError("the file ends too early"), [])})

    strategy = Launched("fsdp2", fsdp_version=2)
    conversion = SimpleNamespace(
        context=SimpleNamespace(strategy=strategy),
        prepared=SimpleNamespace(accelerator=SimpleNamespace(load_state=load_state)),
    )
    with pytest.raises(CheckpointError, match=r"Accelerate cannot load it .* Nothing was written"):
        convert._read_folder(tmp_path, conversion, step=4)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder", "device"])
def test_a_damaged_file_of_torch_save_is_reported_before_it_is_loaded(tmp_path, damage):
    path = tmp_path / "pytorch_model" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.parent.mkdir()
    save({"exp_avg": ones(1000)}, path)
    save({"step": 4}, tmp_path / "scheduler.bin", _use_new_zipfile_serialization=False)
    require_intact_archives(tmp_path)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "device":
        path.symlink_to("/dev/zero")
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]
        path.write_bytes({"cut": content[:middle], "flipped": flipped, "empty": b""}[damage])
    with pytest.raises(CheckpointError, match=r"optim_states.pt is damaged.*Nothing was written"):
        require_intact_archives(tmp_path)
