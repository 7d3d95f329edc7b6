"""A misspelled value of a config is refused with a suggestion; every value that a model reads can be written."""

import inspect

import pytest
from transformers import CONFIG_MAPPING

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config
from finetune.model.loading.config_values import known_names, sub_config_class, sub_configs

BY_GETATTR = (
    *("qwen2", "qwen3_moe", "glm4_moe", "olmo2", "olmo3", "olmoe", "phi3", "smollm3", "granite", "granitemoe"),
    *("lfm2", "dots1", "ernie4_5_moe"),
)
"""Models whose config does not declare `head_dim`, and that read it."""


@pytest.mark.parametrize("kind", BY_GETATTR)
def test_a_value_that_the_config_class_does_not_declare_can_be_written(kind):
    assert "head_dim" not in inspect.signature(CONFIG_MAPPING[kind].__init__).parameters
    assert "head_dim" in known_names(CONFIG_MAPPING[kind])


@pytest.mark.parametrize(
    "kind", [*BY_GETATTR, "llama", "mixtral", "gpt_oss", "deepseek_v3", "bert", "t5", "modernbert"]
)
def test_a_misspelled_value_is_refused_with_a_suggestion(kind):
    for typo, meant in (("hidden_sise", "hidden_size"), ("head_dimm", "head_dim"), ("initializer_rnge", None)):
        section = FromConfigSection(model_type=kind, values={typo: 1})
        with pytest.raises(ModelError, match=f"values.{typo}: the config of `{kind}` has no such value") as error:
            build_model_config(section, vocabulary_size=None, special_ids=SpecialTokenIds())
        if meant is not None and meant in known_names(CONFIG_MAPPING[kind]):
            assert f"`{meant}`" in str(error.value)


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n", "gemma4", "qwen3_5", "llava", "clip"])
def test_values_of_sub_configs_belong_to_these_and_not_to_the_whole(kind):
    whole = CONFIG_MAPPING[kind]
    parts = [part for name in sub_configs(whole) if (part := sub_config_class(whole, name, {})) is not None]
    assert len(parts) >= 2
    for part in parts:
        assert "hidden_size" in known_names(part)
    assert "hidden_size" not in known_names(whole)
