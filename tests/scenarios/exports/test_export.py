"""`finetune export`: one command merges, converts and pushes, whatever folder it is shown."""

import json
import shutil

import pytest
import torch
from ruamel.yaml import YAML
from safetensors.torch import load_file
from transformers import AutoTokenizer

from finetune.commands.export import export
from finetune.config.load import RESOLVED_NAME
from finetune.errors import HubError, UserError
from finetune.export import save

PLAIN = {"step": None, "to": None, "dtype": None, "merge": False, "push_to_hub": None}


def weights(folder):
    found = {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}
    assert found
    return found


def test_run_checkpoint_and_folder_merge_to_the_same_bits(trained, tmp_path):
    lora, merged = trained("lora"), trained("merged")
    export(lora, **{**PLAIN, "merge": True, "to": tmp_path / "of-run"})
    export(lora / "final", **{**PLAIN, "merge": True, "to": tmp_path / "of-folder"})
    wanted = weights(merged / "final")
    for folder in (tmp_path / "of-run", tmp_path / "of-folder"):
        got = weights(folder)
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert AutoTokenizer.from_pretrained(folder).chat_template
        assert not (folder / "base").exists()
    assert "does not need peft" in (tmp_path / "of-folder" / "README.md").read_text()


@pytest.fixture
def quantized(trained, tmp_path):
    """Return the `final/` of a run as if it had trained on a quantized base, held in bfloat16."""
    run = tmp_path / "run"
    shutil.copytree(trained("lora"), run)
    values = YAML(typ="safe").load((run / RESOLVED_NAME).read_text())
    values["model"] |= {"name": str(run / "final" / "base"), "from_config": None, "tokenizer": None}
    values["model"] |= {"quantization": {"bits": 4}, "dtype": "bfloat16"}
    with (run / RESOLVED_NAME).open("w") as file:
        YAML(typ="safe").dump(values, file)
    return run / "final"


def test_the_final_folder_of_a_quantized_run_is_merged_as_the_run_would(quantized, tmp_path, capsys):
    export(quantized, **{**PLAIN, "merge": True, "to": tmp_path / "merged"})
    assert "is merged into the unquantized one" in capsys.readouterr().out
    assert {each.dtype for each in weights(tmp_path / "merged").values()} == {torch.bfloat16}


def test_an_adapter_of_an_unreadable_run_is_merged_in_the_dtype_of_its_base(trained, tmp_path, capsys):
    shutil.copytree(trained("lora"), tmp_path / "run")
    (tmp_path / "run" / RESOLVED_NAME).write_text("model: {no_such_key: 1}\n")
    export(tmp_path / "run" / "final", **{**PLAIN, "merge": True})
    assert "warning: the job that trained the adapter cannot be read" in capsys.readouterr().out
    assert {each.dtype for each in weights(tmp_path / "run" / "final-merged").values()} == {torch.float32}


@pytest.mark.parametrize("keys", [{"rank_pattern": {"q_proj": 8}}, {"target_parameters": ["experts.up"]}, {}])
def test_an_adapter_that_vllm_would_change_is_named(trained, tmp_path, capsys, monkeypatch, keys):
    shutil.copytree(trained("lora") / "final", tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    monkeypatch.setattr("finetune.commands.export.push_folder", lambda *_, **__: "the hub")
    export(tmp_path / "adapter", **{**PLAIN, "push_to_hub": "me/adapter"})
    wanted = [f"`{key}`" for key in keys]
    out = capsys.readouterr().out
    assert all(each in out for each in wanted) and ("vLLM" in out) == bool(wanted)


def test_an_earlier_step_of_a_merging_run_is_merged_too(trained, tmp_path):
    export(trained("merged"), **{**PLAIN, "step": 2, "to": tmp_path / "early"})
    assert (tmp_path / "early" / "config.json").is_file()
    assert not (tmp_path / "early" / "adapter_config.json").exists()


def test_a_whole_model_is_written_in_another_type(trained, tmp_path):
    export(trained("full") / "final", **{**PLAIN, "dtype": "float16", "to": tmp_path / "half"})
    assert {each.dtype for each in weights(tmp_path / "half").values()} == {torch.float16}


@pytest.mark.parametrize(
    ("name", "inside", "keys", "message"),
    [
        ("full", "", {"merge": True}, "this run has no adapter"),
        ("full", "final", {"merge": True}, "has a full model without an adapter"),
        ("full", "final", {}, "is already a model folder"),
        ("lora", "final", {"dtype": "bfloat16"}, "add --merge"),
        ("full", "final", {"step": 2}, "has no checkpoints"),
        ("full", "config.yaml", {}, "does not exist"),
    ],
)
def test_contradictory_export_options_are_rejected(trained, name, inside, keys, message):
    with pytest.raises(UserError, match=message):
        export(trained(name) / inside, **{**PLAIN, **keys})


def test_export_never_overwrites_an_existing_folder(trained, tmp_path):
    for source in (trained("lora"), trained("lora") / "final"):
        with pytest.raises(UserError, match="already exists"):
            export(source, **{**PLAIN, "merge": True, "to": tmp_path})


def test_a_push_that_fails_leaves_the_export(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(save, "is_offline", lambda: True)
    with pytest.raises(HubError, match="cannot be reached"):
        export(trained("lora"), **{**PLAIN, "merge": True, "to": tmp_path / "kept", "push_to_hub": "me/model"})
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    assert HubError.exit_code == 1
