"""Any checkpoint becomes a model folder, from the run's folder alone: without its data, a GPU or its launcher."""

import filecmp
import shutil

import pytest
from safetensors.torch import load_file
from torch import equal
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.export import export_checkpoint
from finetune.errors import CheckpointError, UserError

LORA = "model.lora={rank: 4, alpha: 8}"
AVERAGE = "train.average={decay: 0.5}"  # which is what is exported, at the end and from a checkpoint
QUICK = ["evaluate=null", "data.validation=null", "train.steps=4", "checkpoint.every_steps=2"]

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def runs(launch):
    """Finished runs by name: full and LoRA on one process, and full under zero3 on two."""
    ended = {
        "full": launch(None, name="export-full", overrides=QUICK),
        "lora": launch(None, name="export-lora", overrides=[*QUICK, LORA, AVERAGE]),
        "zero3": launch("zero3", name="export-zero3", overrides=QUICK),
    }
    for run in ended.values():
        assert run.code == 0, run.output
    return {name: run.folder for name, run in ended.items()}


@pytest.fixture
def moved(runs, job, tmp_path):
    """Return a function that copies a run elsewhere and forgets where its data and caches were."""

    def move(name):
        folder = shutil.copytree(runs[name], tmp_path / name)
        path = folder / "resolved.yaml"
        text = path.read_text()
        assert str(job.parent) in text
        path.write_text(text.replace(str(job.parent), "/nowhere"))
        return folder

    return move


def tensors(folder):
    found = {
        f"{path.relative_to(folder)}/{name}": tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert found
    return found


@pytest.mark.parametrize("name", ["full", "lora", "zero3"])
def test_the_last_checkpoint_is_exported_as_the_end_of_the_run_was(moved, name, tmp_path):
    run, out = moved(name), tmp_path / "out"
    export_checkpoint(run, step=None, to=out, dtype=None)
    wanted, got = tensors(run / "final"), tensors(out)
    assert got.keys() == wanted.keys()
    assert all(equal(got[each], wanted[each]) and got[each].dtype == wanted[each].dtype for each in wanted)
    same = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    assert filecmp.cmpfiles(run / "final", out, same, shallow=False) == (same, [], [])


def test_an_earlier_step_is_another_model_of_the_type_that_was_asked_for(moved):
    run = moved("full")
    export_checkpoint(run, step=2, to=None, dtype="bfloat16")
    out = run / "exports" / "step-000002"
    weights = tensors(out)
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.bfloat16"}
    final = {name: tensor.bfloat16() for name, tensor in tensors(run / "final").items()}
    assert not all(equal(weights[name], final[name]) for name in final)
    assert "Trained for 2 steps" in (out / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert AutoModelForCausalLM.from_pretrained(out).config.vocab_size > 0


def test_a_model_that_trains_something_else_is_refused_by_name(moved, tmp_path):
    run = moved("lora")
    path = run / "resolved.yaml"
    path.write_text(path.read_text().replace("rank: 4 ", "rank: 2 "))
    with pytest.raises(CheckpointError, match=r"different shape: .*lora_A"):
        export_checkpoint(run, step=None, to=tmp_path / "out", dtype=None)
    assert not (tmp_path / "out").exists()


def test_a_bad_checkpoint_is_not_exported(moved, tmp_path):
    run = moved("full")
    weights = run / "checkpoints" / "step-000004" / "model" / "00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    with pytest.raises(CheckpointError, match="does not match its digest"):
        export_checkpoint(run, step=None, to=tmp_path / "out", dtype=None)


def test_exporting_a_run_without_its_tokenizer_is_rejected_with_a_remedy(moved, tmp_path):
    run = moved("full")
    shutil.rmtree(run / "inputs")
    with pytest.raises(UserError, match="start the job again"):
        export_checkpoint(run, step=None, to=tmp_path / "out", dtype=None)
