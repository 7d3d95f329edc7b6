"""Where the weights of a merge come from: what was trained, and the base as it lies in memory or as it was before."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.load import load_config
from finetune.config.sections.export import ExportSection
from finetune.errors import HubError, ModelError
from finetune.model.build import build_model
from finetune.run import final_export
from finetune.run.final_export import (
    exports_trained_only,
    load_unquantized_base,
    push_final,
    resolve_export_section,
)
from finetune.run.setup.model_problems import require_valid_merge
from finetune.run.setup.strategy import require_tied_weights_supported
from finetune.run.state.finished import is_exported, read_final_record
from finetune.run.state.run_folder import load_run_inputs
from finetune.runtime.parameters import InitContext

FEW_BITS = "model.quantization={bits: 4}"
LORA = "model.lora={rank: 4}"


@pytest.fixture
def config(trained, job):
    """Return a function that loads a job on the model that the full run has left, with the overrides."""
    base = ["model.from_config=null", "model.tokenizer=null", f"model.name={trained('full')}/final"]
    return lambda *overrides: load_config(job, [*base, *overrides]).config


def test_the_base_is_gathered_only_to_be_merged(config):
    assert exports_trained_only(config(LORA))
    assert not exports_trained_only(config(LORA, "export.merge=true"))
    assert not exports_trained_only(config())
    assert exports_trained_only(config(LORA, FEW_BITS, "export.merge=true"))  # it comes from where it was loaded


def test_a_quantized_base_is_loaded_again_unquantized(config, trained):
    run, said = trained("full"), []
    asked = config(LORA, FEW_BITS, "export.merge=true", "model.dtype=bfloat16")
    kept = load_run_inputs(run, asked)
    found = load_unquantized_base(asked, kept.task(asked), tokenizer=kept.processing.tokenizer, log=said.append)
    wanted = load_file(run / "final" / "model.safetensors")
    assert {name: found[name] for name in wanted}.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == torch.float32 for name in wanted)
    assert "is merged into the unquantized one" in said[0]
    assert resolve_export_section(asked).dtype == "bfloat16"
    assert resolve_export_section(config(LORA, FEW_BITS, "export={merge: true, dtype: float16}")).dtype == "float16"


def test_an_unquantized_base_is_not_loaded_again_for_the_export(config, trained):
    asked = config(LORA, "export.merge=true")
    assert load_unquantized_base(asked, None, tokenizer=None, log=print) == {}
    assert resolve_export_section(asked).dtype is None


def test_adapters_that_correct_the_quantization_are_not_merged_into_the_unquantized_base(config):
    loftq = "model.lora={rank: 4, init: loftq}"
    with pytest.raises(ModelError, match="`init: loftq` corrects the quantization error"):
        require_valid_merge(config(loftq, FEW_BITS, "export.merge=true"))
    require_valid_merge(config(loftq, FEW_BITS))
    require_valid_merge(config(LORA, FEW_BITS, "export.merge=true"))


def test_an_adapter_that_would_untie_a_weight_is_rejected_before_any_strategy_sees_it(config, trained):
    run = trained("full")

    def build(module):
        asked = config(f"model.lora={{rank: 4, target_modules: [{module}]}}")
        inputs = load_run_inputs(run, asked)
        task = inputs.task(asked)
        return build_model(
            asked.model,
            head=task.head,
            head_values=task.head_values,
            tokenizer=inputs.processing.tokenizer,
            seed=asked.run.seed,
            init_context=InitContext(),
        )

    for strategy in ("zero3", "fsdp2"):
        require_tied_weights_supported(build("q_proj"), strategy)
    with pytest.raises(ModelError, match="adapting `lm_head` would untie them"):
        build("lm_head")


SECTION = ExportSection()
RECORD = {"step": 8, "reason": "finished", "export": SECTION.model_dump(), "files": {"config.json": 2}}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "final.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_an_export_of_this_step_with_the_same_settings_already_exists(run):
    assert is_exported(run, step=8, section=SECTION)
    assert not is_exported(run, step=9, section=SECTION)
    (run / "final" / "config.json").write_text("{} ")
    assert not is_exported(run, step=8, section=SECTION)


DAMAGED = {
    "a list": b"[]",
    "no JSON": b"{",
    "nested too deep": b"[" * 200_000,
    "files that are none": json.dumps(RECORD | {"files": []}).encode(),
    "a step that is text": json.dumps(RECORD | {"step": "8"}).encode(),
    "more than there is": json.dumps(RECORD | {"more": 1}).encode(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_export_record_is_ignored_and_the_export_is_repeated(run, what):
    (run / "final.json").write_bytes(DAMAGED[what])
    assert read_final_record(run) is None
    assert not is_exported(run, step=8, section=SECTION)


@pytest.fixture
def over(trained, job, tmp_path):
    """Return a function that publishes a finished run whose job asks for it; and what was said, and the record."""
    folder = shutil.copytree(trained("full"), tmp_path / "run")

    def ask(*overrides):
        loaded = load_config(job, [f"run.folder={folder}", *overrides])
        said = []
        push_final(loaded.config, log=said.append)
        return said, json.loads((folder / "final.json").read_text())

    return ask


def test_final_is_uploaded_once(over, monkeypatch):
    pushed = []
    monkeypatch.setattr(
        final_export, "push_folder", lambda *given, **keys: pushed.append((given, keys)) or "https://hub/x"
    )
    wish = ["export.push_to_hub=me/model", "export.private=false"]
    said, record = over(*wish)
    assert said == ["uploaded to https://hub/x"]
    assert record["pushed_to"] == "me/model"
    assert over(*wish)[0] == []
    (((folder, name), keys),) = pushed
    assert (folder.name, name, keys) == ("final", "me/model", {"private": False})


def test_a_failure_is_a_warning_and_is_tried_again(over, monkeypatch):
    def fail(*_, **__):
        raise HubError("`me/model` was not uploaded: no network.")

    monkeypatch.setattr(final_export, "push_folder", fail)
    for _ in range(2):
        said, record = over("export.push_to_hub=me/model")
        assert said == ["warning: export.push_to_hub: `me/model` was not uploaded: no network."]
        assert (record["pushed_to"], record["push_problem"]) == (None, "`me/model` was not uploaded: no network.")


def test_the_final_model_is_pushed_only_if_requested(over, monkeypatch):
    monkeypatch.setattr(final_export, "push_folder", None)
    said, record = over()
    assert said == [] and "pushed_to" not in record
