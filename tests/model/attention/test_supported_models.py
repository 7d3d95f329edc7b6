"""Models with other layers than plain attention compute each sample of a row as if it were alone."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from finetune.errors import ModelError
from finetune.model.attention.implementation import default_attention
from finetune.model.attention.supported_models import (
    check_padding,
    padding_reason,
    randomness,
    text_config,
)
from tests.model.attention.small_models import LENGTHS, row_of, tiny_config, tiny_model, tokens
from tests.refusals import refused

KINDS = [
    *("deepseek_v3", "falcon_h1", "gemma3n_text", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoehybrid", "lfm2"),
    *("lfm2_moe", "llama4_text", "mamba2", "ministral3", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
    *("bailing_hybrid", "qwen3_5_text", "qwen3_next", "zamba2"),
]
LAYOUTS = {"of any length": LENGTHS, "of one length": (9, 9, 9)}


def samples_of(lengths):
    return [tokens(length, salt) for salt, length in enumerate(lengths)]


def padded(samples):
    """Return the samples as a padded batch, and the mask of its tokens."""
    longest = max(sample.shape[1] for sample in samples)
    mask = torch.stack([(torch.arange(longest) < sample.shape[1]).long() for sample in samples])
    ids = torch.cat([torch.nn.functional.pad(sample, (0, longest - sample.shape[1])) for sample in samples])
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}, mask.bool()


def gradients(model, logits):
    """Return the gradient of a sum over all tokens, by parameter; experts that no token reaches have none."""
    model.zero_grad()
    logits.log_softmax(-1)[..., 5].sum().backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(ours, theirs, tolerance=1e-5):
    assert ours.keys() == theirs.keys()
    norm = torch.stack([each.norm() for each in theirs.values()]).norm()
    for name, each in ours.items():
        difference = (each - theirs[name]).norm()
        assert difference <= tolerance * theirs[name].norm() or difference <= 1e-6 * norm, name


@pytest.mark.parametrize("lengths", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_sample_alone_and_gradients_those_of_a_padded_batch(kind, lengths):
    model, samples = tiny_model(kind), samples_of(lengths)
    logits = model(**row_of(samples)).logits
    with torch.no_grad():
        alone = torch.cat([model(input_ids=sample, use_cache=False).logits for sample in samples], dim=1)
    assert ((logits - alone).abs().max() / alone.abs().max()).item() < 1e-5
    of_row = gradients(model, logits)
    inputs, is_token = padded(samples)
    assert_same(of_row, gradients(model, model(**inputs).logits[is_token][None]))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("jamba", "its scan (Mamba 1) does not get the boundaries of samples"),
        ("minimax", "its layers carry a state along the row"),
        ("stablelm", "its attention does not get the boundaries of samples"),
        ("deepseek_v32", "its sparse attention picks keys from the whole row"),
        ("xglm", "it is not known to keep packed samples apart"),
    ],
)
def test_a_model_that_needs_padding_is_reported_with_the_reason(kind, reason):
    said = padding_reason(AutoConfig.for_model(kind))
    assert said is not None
    assert said.startswith(f"`{kind}`: {reason}")
    assert default_attention(AutoConfig.for_model(kind)) is None


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("qwen2_moe", {"layer_types": ["full_attention", "sliding_attention"]}, "layers of another kind: sliding_att"),
        ("qwen3_next", {"output_router_logits": True}, "reads the padding mask"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "is not a causal decoder"),
    ],
)
def test_config_values_can_prevent_packing(kind, values, reason):
    assert reason in padding_reason(tiny_config(kind, **values))


def test_a_vision_language_model_built_as_its_text_part_is_checked_as_a_text_model():
    config = AutoConfig.for_model("qwen3_5")
    assert text_config(config).model_type == "qwen3_5_text"
    assert padding_reason(config) is None
    assert default_attention(config) == "per_sample"
    assert text_config(AutoConfig.for_model("gemma3")).model_type == "gemma3"


def test_a_model_built_with_its_vision_part_is_reported():
    assert "is built with its image part" in padding_reason(AutoConfig.for_model("gemma3"))


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def characters(text):
    return {"input_ids": [1, *(3 + ord(each) % 90 for each in text), 2]}


def check(model_type, auto=AutoModel, output="last_hidden_state", **values):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL, vocab_size=128, **values)
    model = auto.from_config(config).eval()

    def outputs_of(samples):
        rows = [torch.tensor(sample) for sample in samples]
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
    with refused(ModelError, f"`{model_type}`", "Do X.", varies=True):
        check(model_type, **values)


def test_masked_and_causal_attention_do_not_read_padding():
    check("bert")
    check("llama", AutoModelForCausalLM, "logits", num_key_value_heads=2)


def test_random_operations_other_than_dropout_are_named():
    assert randomness(AutoConfig.for_model("mixtral")) is None
    assert "hashes at random" in randomness(AutoConfig.for_model("yoso"))
    assert "`router_jitter_noise: 0.01`" in randomness(AutoConfig.for_model("switch_transformers"))
