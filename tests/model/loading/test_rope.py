"""YaRN and other scaling of rotary embeddings is computed as in the paper, in every form of config."""

import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    Ministral3Config,
    MixtralConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3VLTextConfig,
    RecurrentGemmaConfig,
)

from finetune.config.sections.model import ModelSection, RopeScalingSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.dry_run import dry_run_model
from finetune.model.upstream import written_head_size
from tests.refusals import refused

SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3},
}
LAYERS = {"layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma3_text": Gemma3TextConfig(**SIZES, head_dim=8, **LAYERS),
    "gemma3": Gemma3Config(text_config={**SIZES, "head_dim": 8, **LAYERS}),
    "gpt2": GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
    "ministral3": Ministral3Config(**SIZES, head_dim=8),
    "mrope": Qwen3VLTextConfig(
        **SIZES, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3]}
    ),
    "gemma4_text": Gemma4TextConfig(vocab_size=64, vocab_size_per_layer_input=64),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, original_max_position_embeddings=64),
    "recurrent_gemma": RecurrentGemmaConfig(
        **{name: SIZES[name] for name in SIZES if name != "max_position_embeddings"}, lru_width=32
    ),
    "trained_with_yarn": LlamaConfig(
        **{**SIZES, "max_position_embeddings": 256},
        rope_parameters={
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e5},
            **{"beta_fast": 16.0, "attention_factor": 1.0},
        },
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return folders of configs, with weights where a test needs them."""
    folder = tmp_path_factory.mktemp("bases")
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / name)
    for name in ("llama", "qwen3", "recurrent_gemma"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(folder / name)
    return folder


def changed(bases, name, **keys):
    return load_pretrained_config(ModelSection(name=str(bases / name), **keys))


def scaled(bases, name, **values):
    return changed(bases, name, rope_scaling=RopeScalingSection(**{**YARN, **values}))


def yarn(parameters, size):
    """Return the inverse frequencies and the attention scaling of Peng et al. (2023), sections 3.2 to 3.4.

    A dimension that turns more than 32 times in the length of pre-training stays, one that turns less than once is
    interpolated, and between them the two are mixed; bounds are rounded outwards, as in the authors' code.
    """
    base, factor = parameters["rope_theta"], parameters["factor"]
    origin = parameters["original_max_position_embeddings"]

    def turning(number):
        return size * math.log(origin / (number * 2 * math.pi)) / (2 * math.log(base))

    low, high = turning(parameters.get("beta_fast", 32)), turning(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    frequencies = []
    for pair in range(size // 2):
        usual = base ** (-2 * pair / size)
        interpolated = min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0)
        frequencies.append(usual * (1 - interpolated) + usual / factor * interpolated)
    is_undone = parameters.get("mscale_all_dim") == 1.0  # DeepSeek and Ministral scale the softmax instead
    return torch.tensor(frequencies), 1.0 if is_undone else 0.1 * math.log(factor) + 1.0


@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral3", "mixtral", "trained_with_yarn"])
def test_yarn_is_that_of_the_paper(bases, name):
    config = scaled(bases, name, factor=8.0)
    assert config.max_position_embeddings == 8 * config.rope_parameters["original_max_position_embeddings"]
    module = AutoModelForCausalLM.from_config(config).model.rotary_emb
    frequencies, scaling = yarn(config.rope_parameters, 2 * len(module.inv_freq))
    assert torch.allclose(module.inv_freq, frequencies, rtol=1e-5)
    assert module.attention_scaling == pytest.approx(scaling)
    assert not torch.allclose(
        module.inv_freq, AutoModelForCausalLM.from_config(CONFIGS[name]).model.rotary_emb.inv_freq
    )


def test_rope_values_unrelated_to_scaling_are_kept(bases):
    sections = scaled(bases, "mrope").rope_parameters
    assert (sections["mrope_section"], sections["rope_theta"], sections["rope_type"]) == ([2, 3, 3], 5e5, "yarn")
    old = CONFIGS["ministral3"].rope_parameters
    new = changed(bases, "ministral3", config={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}).rope_parameters
    assert new["llama_4_scaling_beta"] == old["llama_4_scaling_beta"]
    assert "beta_fast" not in new
    same = changed(bases, "trained_with_yarn", config={"rope_scaling": {**YARN, "factor": 8.0}}).rope_parameters
    assert (same["beta_fast"], same["factor"], "attention_factor" in same) == (16.0, 8.0, False)


def test_only_layers_with_full_attention_are_scaled(bases):
    for config in (scaled(bases, "gemma3_text"), scaled(bases, "gemma3").text_config):
        assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
        assert config.rope_parameters["full_attention"]["original_max_position_embeddings"] == 64
        assert (
            config.rope_parameters["sliding_attention"] == CONFIGS["gemma3_text"].rope_parameters["sliding_attention"]
        )
        assert config.max_position_embeddings == 256


def test_a_written_pre_training_length_takes_precedence(bases):
    config = scaled(bases, "llama", original_max_position_embeddings=32)
    assert config.rope_parameters["original_max_position_embeddings"] == 32
    assert config.max_position_embeddings == 128
    assert scaled(bases, "llama", rope_type="linear").rope_parameters == {
        **{"rope_type": "linear", "factor": 4.0, "rope_theta": CONFIGS["llama"].rope_parameters["rope_theta"]}
    }


REFUSED = {
    "gpt2": ({}, "`gpt2`"),
    "recurrent_gemma": ({}, "`recurrent_gemma`"),
    "gemma4_text": ({}, "`gemma4_text`"),
    "phi3": ({}, "longrope"),
    "trained_with_yarn": ({"factor": 2.0}, "64 positions x 2 = 128"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scaling_that_the_model_cannot_have_is_refused(bases, name):
    values, fact = REFUSED[name]
    with refused(ModelError, "model.rope_scaling: ", fact, varies=name == "phi3"):
        scaled(bases, name, **values)


def test_a_scaling_that_the_code_does_not_read_is_refused(bases):
    section = ModelSection(
        name=str(bases / "recurrent_gemma"), config={"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    )
    with refused(ModelError, "model.config.rope_scaling", "`recurrent_gemma`"):
        dry_run_model(section, head="causal_lm")


def test_a_length_of_pre_training_that_another_value_overrides_is_refused(bases):
    scaling = {
        **{"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        "original_max_position_embeddings": 32,
    }
    with refused(ModelError, "`original_max_position_embeddings: 64`", "model.config.original"):
        changed(bases, "phi3", config={"rope_scaling": scaling})


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def on_meta(config, scaling):
    config = type(config).from_dict({**config.to_dict(), "rope_parameters": scaling})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_yarn_still_needs_a_head_size_in_the_config():
    """When this fails, `written_head_size` can be removed."""
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = MixtralConfig(**TINY, rope_parameters=yarn)
    assert config.head_dim is None
    with pytest.raises(TypeError, match="NoneType"):
        on_meta(config, yarn)
    assert written_head_size(config, yarn) == {"head_dim": 8}
    assert written_head_size(config, {"full_attention": yarn}) == {"head_dim": 8}
    assert written_head_size(config, LINEAR) == {}
    assert written_head_size(LlamaConfig(**TINY, head_dim=16), yarn) == {}
