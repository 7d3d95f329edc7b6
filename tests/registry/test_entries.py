"""Every entry of every table has its implementation, and what it says is so."""

import pytest
import torch
from pydantic import ValidationError

from finetune.config.sections.train import OptimizerSection
from finetune.errors import MissingPackage, ModelError, RegistryError
from finetune.model.size import optimizer_state_bytes
from finetune.registry.formats import FORMATS
from finetune.registry.losses import EMBEDDING_LOSSES, LOSS_KERNELS, PREFERENCE_LOSSES, RERANKING_LOSSES
from finetune.registry.model_choices import ATTENTIONS, PER_SAMPLE_ATTENTION, takes_boundaries
from finetune.registry.observers import TRACKERS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES, OptimizerEntry, OptimizerState, state_of_class
from finetune.registry.table import import_attribute
from finetune.registry.tasks import METRICS, TASKS, reads_of_head, tasks_where
from finetune.train.optim.optimizers import build_optimizer
from finetune.train.optim.parameter_groups import NamedParameter

TABLES = (
    ATTENTIONS,
    EMBEDDING_LOSSES,
    FORMATS,
    LOSS_KERNELS,
    METRICS,
    OPTIMIZERS,
    PREFERENCE_LOSSES,
    RERANKING_LOSSES,
    SCHEDULES,
    TASKS,
    TRACKERS,
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_every_implementation_can_be_imported(table):
    found = [table.resolve(entry.name) for entry in table if entry.implementation]
    assert all(callable(each) for each in found)
    assert len(list(table)) >= 3


@pytest.mark.parametrize("task", list(TASKS), ids=lambda task: task.name)
def test_a_task_has_the_head_declared_in_its_entry(task):
    paths = {entry.task for entry in PREFERENCE_LOSSES} if task.name == "preference" else {task.implementation}
    assert {import_attribute(path).head for path in paths} == {task.head}


def test_tasks_read_formats_and_measure_metrics_that_exist():
    assert {form for task in TASKS for form in task.formats} <= set(FORMATS.choices)
    assert {form.usual_task for form in FORMATS} <= set(TASKS.choices)
    measured = {metric for task in TASKS for metric in task.metrics}
    assert measured - set(METRICS.choices) == {"reward_chosen", "reward_rejected"}  # neither better high nor low


def test_our_attention_takes_boundaries_and_cannot_be_chosen():
    assert takes_boundaries(PER_SAMPLE_ATTENTION) and PER_SAMPLE_ATTENTION not in ATTENTIONS.choices
    assert not takes_boundaries("sdpa") and not takes_boundaries("kernels/another") and not takes_boundaries(None)


def test_a_head_reads_the_modality_of_its_task():
    assert reads_of_head("image_text_to_text") == "both" and reads_of_head("image_classification") == "images"
    assert reads_of_head("causal_lm") == reads_of_head("a_head_of_tomorrow") == "text"


def test_tasks_are_listed_by_a_fact():
    assert tasks_where("may_be_packed") == tasks_where("may_be_sliced") == ("sft", "pretrain")
    assert tasks_where("has_images") == ("image_classification", "vision_language_sft")


@pytest.mark.parametrize("entry", list(OPTIMIZERS), ids=lambda entry: entry.name)
def test_an_optimizer_keeps_the_state_declared_in_its_entry(entry):
    weight = torch.nn.Parameter(torch.ones(64, 64))
    named = [NamedParameter("layers.0.weight", ("layers.0.weight",), weight)]
    momentum = {"momentum": 0.9} if "momentum" in entry.reads else {}
    section = OptimizerSection(name=entry.name, **momentum)
    try:
        optimizer = build_optimizer(named, section, learning_rate=0.1)
    except (MissingPackage, ModelError) as error:
        pytest.skip(str(error))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    assert type(optimizer).__name__ in {each.class_name for each in entry.states}
    own = state_of_class(type(optimizer).__name__)
    assert own in entry.states
    kept = {key for key, value in state.items() if isinstance(value, torch.Tensor) and value.shape == weight.shape}
    if own.is_elementwise and not entry.needs_matrices:
        assert kept == set(own.keys_for(optimizer.defaults))
        assert len(kept) == entry.num_moments


def test_nothing_is_known_about_the_state_of_an_unknown_class():
    assert state_of_class("Prodigy") == OptimizerState(class_name="Prodigy", is_elementwise=False)
    assert state_of_class("AdamW").keys_for({"amsgrad": True}) == ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def test_an_optimizer_entry_with_defaults_for_unread_keys_is_rejected():
    with pytest.raises(RegistryError, match="has defaults of keys that it does not read"):
        OptimizerEntry(
            name="fast", states=(OptimizerState(class_name="Fast"),), num_moments=0, defaults={"betas": (0.9, 0.99)}
        )


def test_an_optimizer_of_another_package_can_be_written_in_a_job_with_its_own_defaults(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))
    entry = OptimizerEntry(
        name="prodigy",
        implementation="another_package.prodigy:build",
        states=(OptimizerState(class_name="Prodigy", keys=("exp_avg", "exp_avg_sq", "s"), is_elementwise=False),),
        num_moments=3,
        reads=frozenset({"betas"}),
        defaults={"betas": (0.9, 0.99)},
    )
    with pytest.raises(ValidationError, match="Input should be adamw"):
        OptimizerSection(name="prodigy")
    OPTIMIZERS.register(entry)
    assert OptimizerSection(name="prodigy").betas == (0.9, 0.99)
    assert OptimizerSection(name="prodigy", betas=[0.8, 0.9]).betas == (0.8, 0.9)
    assert OptimizerSection().betas == OptimizerSection(name="muon").betas == (0.9, 0.999)
    assert "prodigy" in OptimizerSection.model_json_schema()["properties"]["name"]["enum"]
    assert optimizer_state_bytes("prodigy", None, num_trained=10, trained_bytes=40) == 120
    assert state_of_class("Prodigy").keys_for({}) == ("exp_avg", "exp_avg_sq", "s")
