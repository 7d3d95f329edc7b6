"""Each workaround is still needed: a test here that fails says which one may go."""

import inspect
from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from finetune.export.upstream import CHECKED_WITH, transformers_class, write_generation_config


@pytest.mark.parametrize("package", CHECKED_WITH)
def test_no_package_is_newer_than_the_workarounds_were_checked_with(package):
    newest = Version(CHECKED_WITH[package])
    assert Version(version(package)).release[:2] <= newest.release, (
        f"look at each workaround for {package} in export/upstream.py, then raise CHECKED_WITH"
    )


@pytest.fixture
def group():
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp2_still_replaces_the_class_of_a_model(group):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = fully_shard(LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)))
    assert type(model) is not LlamaForCausalLM
    assert transformers_class(model) is LlamaForCausalLM


def test_parts_of_a_composite_model_are_still_partitioned_at_birth_under_zero3():
    assert "deepspeed.zero.Init" in inspect.getsource(PreTrainedModel._from_config)


def test_transformers_still_refuses_to_save_settings_that_it_loads(tmp_path):
    config = GenerationConfig(temperature=0.5, do_sample=False, max_new_tokens=7)
    with pytest.raises(ValueError, match="temperature"):
        config.save_pretrained(tmp_path)
    write_generation_config(config, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
