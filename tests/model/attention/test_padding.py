"""What reads its padding is found before training; what draws random numbers is named."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from finetune.errors import ModelError
from finetune.model.attention.padding import check_padding, randomness

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def characters(text):
    return {"input_ids": [1, *(3 + ord(each) % 90 for each in text), 2]}


def check(model_type, auto=AutoModel, output="last_hidden_state", **values):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, vocab_size=128, **values)
    model = auto.from_config(config).eval()

    def outputs_of(samples):
        rows = [torch.tensor(each) for each in samples]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        given = {"input_ids": ids} if model_type == "fnet" else {"input_ids": ids, "attention_mask": mask}
        return model(**given)[output]

    check_padding(outputs_of, config=config, tokenizer=characters, longest=200, is_half=False, advice="Do X.")


@pytest.mark.parametrize(
    ("model_type", "values"),
    [("fnet", {}), ("nystromformer", {}), ("convbert", {"embedding_size": 32, "conv_kernel_size": 3, "head_ratio": 2})],
)
def test_a_model_that_mixes_padding_into_its_samples_is_refused_by_name(model_type, values):
    with pytest.raises(ModelError, match=f"`{model_type}` reads its padding: .* of the largest output\\). Do X."):
        check(model_type, **values)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_masked_attention_does_not_read_padding(model_type):
    check(model_type)


def test_a_causal_model_does_not_read_padding():
    check("llama", AutoModelForCausalLM, "logits", num_key_value_heads=2)


def test_random_operations_other_than_dropout_are_named():
    assert randomness(AutoConfig.for_model("mixtral")) is None
    assert "hashes at random" in randomness(AutoConfig.for_model("yoso"))
    assert "`router_jitter_noise: 0.01`" in randomness(AutoConfig.for_model("switch_transformers"))
