"""A dry run on the meta device reports invalid config values by their key before the slow parts of a start."""

import time

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from finetune.config.sections.model import FromConfigSection, ModelSection, TokenizerSection, TrainTokenizerSection
from finetune.errors import ModelError
from finetune.model.loading import dry_run
from finetune.model.loading.dry_run import dry_run_model
from finetune.model.loading.hub import loading_errors

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def section(kind="llama", **values) -> ModelSection:
    tokenizer = TokenizerSection(train=TrainTokenizerSection(vocabulary_size=640))
    return ModelSection(from_config=FromConfigSection(model_type=kind, values=values), tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 0}, "ZeroDivisionError"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"num_key_value_heads": 3}, "size of tensor a (4) must match"),  # it is built, and fails when it is asked
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1 is negative"),
        ({"pad_token_id": 999_999}, "999999 is outside the vocabulary of 640"),
        ({"vocab_size": 10**12}, "parameters. Write other values."),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": 10**12}, "overflowed"),
        ({"intermediate_size": 0}, "empty parameters"),
        ({"hidden_act": "nope"}, "'nope'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    ],
)
def test_invalid_config_values_are_reported_by_key_and_not_as_a_hub_error(monkeypatch, values, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("finetune.model.loading.hub.is_offline", lambda: True)
    with pytest.raises(ModelError) as error:
        dry_run_model(section(**{**SMALL, **values}), head="causal_lm")
    assert str(error.value).startswith("model.from_config.values")
    assert said in str(error.value)
    assert "hub" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "head", "values"),
    [
        ("llama", "causal_lm", SMALL),
        ("llama", "sequence_classification", SMALL | {"num_key_value_heads": 2}),
        ("mixtral", "causal_lm", SMALL),  # its experts have no kernel on the meta device: a small one is asked for real
        ("t5", "seq2seq_lm", {}),
        ("bert", "masked_lm", {}),
    ],
)
def test_valid_config_values_pass_without_changing_the_random_state(kind, head, values):
    before = torch.random.get_rng_state()
    dry_run_model(section(kind, **values), head=head)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_the_dry_run_of_an_image_model_uses_an_image(kind):
    dry_run_model(ModelSection(from_config=FromConfigSection(model_type=kind)), head="image_classification")


def test_a_model_of_70_billion_parameters_takes_no_memory_and_little_time():
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    started = time.process_time()
    dry_run_model(section(**large, intermediate_size=28_672), head="causal_lm")
    assert time.process_time() - started < 10


def test_building_a_model_stops_at_the_module_limit(monkeypatch):
    monkeypatch.setattr(dry_run, "_MAX_MODULES", 1_000)
    with pytest.raises(ModelError, match="more than 1,000 modules"):
        dry_run_model(section(**SMALL | {"num_hidden_layers": 10**9}), head="causal_lm")


def test_building_a_model_stops_at_the_time_limit(monkeypatch):
    monkeypatch.setattr(dry_run, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(dry_run, "_MAX_MODULES", 10**12)
    with pytest.raises(ModelError, match="takes more than 0 s"):
        dry_run_model(section(**SMALL | {"num_hidden_layers": 10**9}), head="causal_lm")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ValueError("hidden_size is no multiple"), "Check the values in its config.json."),
        (LocalEntryNotFoundError("not in the cache"), "The hub cannot be reached"),
    ],
)
def test_only_network_errors_are_reported_as_an_unreachable_hub(monkeypatch, error, advice):
    monkeypatch.setattr("finetune.model.loading.hub.is_offline", lambda: True)
    with pytest.raises(ModelError) as raised, loading_errors("some/model", key="model.name"):
        raise error
    assert advice in str(raised.value)
