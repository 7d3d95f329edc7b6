"""Where the weights of a merge come from: what was trained, and the base as it lies in memory or as it was before."""

import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from finetune.config.load import load_config
from finetune.errors import ModelError, StrategyError
from finetune.run.adapters import require_ties_fit
from finetune.run.kept import load_kept
from finetune.run.merging import needs_trained_only, original_weights, require_mergeable, written_section
from finetune.run.model import build_model
from finetune.runtime.construction import Construction

FEW_BITS = "model.quantization={bits: 4}"
LORA = "model.lora={rank: 4}"


@pytest.fixture
def config(trained, job):
    """Return a function that loads a job on the model that the full run has left, with the overrides."""
    base = ["model.from_config=null", "model.tokenizer=null", f"model.name={trained('full')}/final"]
    return lambda *overrides: load_config(job, [*base, *overrides]).config


def test_the_base_is_gathered_to_be_merged_and_left_where_it_is_otherwise(config):
    assert needs_trained_only(config(LORA))
    assert not needs_trained_only(config(LORA, "export.merge=true"))
    assert not needs_trained_only(config())
    assert needs_trained_only(config(LORA, FEW_BITS, "export.merge=true"))  # it comes from where it was loaded


def test_a_base_in_few_bits_is_loaded_again_in_full(config, trained):
    run, said = trained("full"), []
    asked = config(LORA, FEW_BITS, "export.merge=true", "model.dtype=bfloat16")
    kept = load_kept(run, asked)
    found = original_weights(asked, kept.task(asked), tokenizer=kept.processing.tokenizer, say=said.append)
    wanted = load_file(run / "final" / "model.safetensors")
    assert {name: found[name] for name in wanted}.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == torch.float32 for name in wanted)
    assert "is merged into the original one, loaded in full precision" in said[0]
    assert written_section(asked).dtype == "bfloat16"
    assert written_section(config(LORA, FEW_BITS, "export={merge: true, dtype: float16}")).dtype == "float16"


def test_nothing_is_loaded_again_where_nothing_is_in_few_bits(config, trained):
    asked = config(LORA, "export.merge=true")
    assert original_weights(asked, None, tokenizer=None, say=print) == {}
    assert written_section(asked).dtype is None


def test_adapters_that_make_up_for_few_bits_are_not_put_on_the_original(config):
    loftq = "model.lora={rank: 4, init: loftq}"
    with pytest.raises(ModelError, match="adapters of `init: loftq` make up for what quantisation lost"):
        require_mergeable(config(loftq, FEW_BITS, "export.merge=true"))
    require_mergeable(config(loftq, FEW_BITS))
    require_mergeable(config(LORA, FEW_BITS, "export.merge=true"))


def test_the_merged_config_tells_of_no_few_bits(trained):
    config = json.loads((trained("merged") / "final" / "config.json").read_text())
    assert "quantization_config" not in config


def test_an_adapter_on_a_tied_weight_is_refused_where_accelerate_ties_anew(config, trained):
    run = trained("full")
    for module, is_refused in (("lm_head", True), ("q_proj", False)):
        asked = config(f"model.lora={{rank: 4, target_modules: [{module}]}}")
        kept = load_kept(run, asked)
        tokenizer = kept.processing.tokenizer
        model = build_model(asked, task=kept.task(asked), tokenizer=tokenizer, construction=Construction())
        require_ties_fit(model, "zero3")
        with pytest.raises(StrategyError, match="on the tied weight `lm_head`") if is_refused else nullcontext():
            require_ties_fit(model, "fsdp2")
