"""Where the weights of a job are placed when they are loaded."""

import pytest
import torch

from finetune.config.load import load_config
from finetune.model import build
from finetune.registry.tasks import TASKS
from finetune.runtime.parameters import InitContext
from finetune.strategy.choose import DataParallel, FullySharded, ZeroRedundancy
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.reconcile import JobSettings

CUDA = torch.device("cuda", 1)
JOB = JobSettings(strategy=None, precision="bf16", microbatch_size=1, max_gradient_norm=1.0)


class Asked(Exception):
    """A model was about to be loaded."""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], CUDA),
        (["model.lora={rank: 4, alpha: 8}"], CUDA),
        (["model.lora={rank: 4, alpha: 8, init: gaussian}"], CUDA),
        (["model.lora={rank: 4, alpha: 8, init: pissa}"], None),
        (["model.lora={rank: 4, alpha: 8, dora: true}"], None),
        (["model.new_tokens={tokens: [abc]}"], None),
        (["model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}"], None),
    ],
)
def test_initial_values_that_are_computed_from_weights_are_computed_on_the_cpu(job, monkeypatch, overrides, expected):
    def load(section, *, init_context, **others):
        raise Asked(init_context.device)

    monkeypatch.setattr(build, "load_model", load)
    config = load_config(job, overrides).config
    head = TASKS[config.task.name].head
    with pytest.raises(Asked) as found:
        build.build_model(
            config.model, head=head, head_values={}, tokenizer=None, seed=1, init_context=InitContext(device=CUDA)
        )
    assert found.value.args == (expected,)


def test_only_strategies_that_copy_the_model_load_it_straight_to_the_device():
    environment = {"world": 8, "has_device": True}
    assert DataParallel(LaunchEnvironment(**environment)).init_context(CUDA).device == CUDA
    for stage in (1, 2, 3):
        assert ZeroRedundancy(LaunchEnvironment(**environment, zero_stage=stage), JOB).init_context(CUDA).device is None
    assert FullySharded(LaunchEnvironment(**environment, is_fsdp=True), JOB).init_context(CUDA).device is None
