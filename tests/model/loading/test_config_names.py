"""Every value that a model reads can be written, wherever its source reads it, and nothing else."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from finetune.config.sections.model import FromConfigSection
from finetune.errors import ModelError
from finetune.model.loading.architecture import SpecialTokenIds, build_model_config
from finetune.model.loading.config_names import known_names, names_in_source, sub_config_class, sub_configs

BY_GETATTR = (
    *("qwen2", "qwen3_moe", "glm4_moe", "olmo2", "olmo3", "olmoe", "phi3", "smollm3", "granite", "granitemoe"),
    *("lfm2", "dots1", "ernie4_5_moe"),
)
"""Models whose config does not declare `head_dim`, and that read it."""


@pytest.mark.parametrize("kind", BY_GETATTR)
def test_a_value_that_only_the_source_reads_can_be_written(kind):
    assert "head_dim" not in inspect.signature(CONFIG_MAPPING[kind].__init__).parameters
    assert "head_dim" in known_names(CONFIG_MAPPING[kind])


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe", "olmoe"])
def test_it_is_in_the_config_that_the_model_is_built_from(kind):
    section = FromConfigSection(model_type=kind, values={"head_dim": 24, "hidden_size": 64})
    config = build_model_config(section, vocabulary_size=300, special_ids=SpecialTokenIds(eos=0))
    assert config.head_dim == 24


@pytest.mark.parametrize(
    "kind", [*BY_GETATTR, "llama", "mixtral", "gpt_oss", "deepseek_v3", "bert", "t5", "modernbert"]
)
def test_a_typo_is_told_the_name_that_is_meant(kind):
    for typo, meant in (("hidden_sise", "hidden_size"), ("head_dimm", "head_dim"), ("initializer_rnge", None)):
        section = FromConfigSection(model_type=kind, values={typo: 1})
        with pytest.raises(ModelError, match=f"values.{typo}: the config of `{kind}` has no such value") as error:
            build_model_config(section, vocabulary_size=None, special_ids=SpecialTokenIds())
        if meant is not None and meant in known_names(CONFIG_MAPPING[kind]):
            assert f"`{meant}`" in str(error.value)


def test_what_a_config_computes_itself_and_what_it_returns_is_no_value():
    assert not {"is_gated_act", "dense_act_fn"} & known_names(CONFIG_MAPPING["t5"])
    for kind in ("llama", "bert", "qwen3_moe"):
        assert not [name for name in names_in_source(CONFIG_MAPPING[kind]) if name.startswith("_")]
        assert not {"to_dict", "get_text_config", "num_labels", "use_return_dict"} & names_in_source(
            CONFIG_MAPPING[kind]
        )


@pytest.mark.parametrize("kind", ["gemma3", "gemma3n", "gemma4", "qwen3_5", "llava", "clip"])
def test_a_model_of_parts_has_no_values_of_its_parts(kind):
    """What only a part declares is refused for the whole, and taken for the part."""
    whole = CONFIG_MAPPING[kind]
    parts = [part for name in sub_configs(whole) if (part := sub_config_class(whole, name, {})) is not None]
    assert len(parts) >= 2
    for part in parts:
        assert "hidden_size" in known_names(part)
    assert "hidden_size" not in names_in_source(whole)
    assert "num_attention_heads" not in names_in_source(whole)


def test_what_is_read_is_found_as_a_plain_search_of_the_source_finds_it():
    """For models of one config: every `config.X` and `getattr(config, "X"` of the text is known, or cannot be set."""
    num_seen = 0
    for kind in ("llama", "qwen3_moe", "mixtral", "olmoe", "gpt2", "bert"):
        config_class = CONFIG_MAPPING[kind]
        module = Path(inspect.getsourcefile(config_class).replace("configuration_", "modeling_"))
        code = ast.unparse(ast.parse(module.read_text(encoding="utf-8")))
        names = set(re.findall(r"\bconfig\.(\w+)(?!\w*\()", code))
        names |= set(re.findall(r"getattr\((?:self\.)?config, '(\w+)'", code))
        for name in names:
            inherited = getattr(config_class, name, None)
            can_be_set = not (callable(inherited) or isinstance(inherited, property) or name.startswith("_"))
            if can_be_set and not code.count(f"config.{name}("):
                assert name in known_names(config_class), (kind, name)
                num_seen += 1
    assert num_seen > 60
