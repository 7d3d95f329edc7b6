"""The balance loss is that of the whole step: transformers' on one batch, and the same however that is cut."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.features import Features
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext
from finetune.task.router_loss.loss import RoutedTask, RoutingRecorder, load_balancing_loss, load_metrics
from finetune.task.router_loss.routers import find_routers
from tests.task.router_loss.mixtures import SIGMOID, SOFTMAX, VOCABULARY, mixture

LENGTHS = (9, 3, 14, 6)
COEFFICIENT = 0.5


def features():
    chance = np.random.default_rng(0)
    return [
        Features({"input_ids": chance.integers(1, VOCABULARY, length), "is_target": np.ones(length, bool)}, number)
        for number, length in enumerate(LENGTHS)
    ]


def causal_task(*, is_free=False):
    data = DataSection(train=TrainingSourceSection(path="rows.jsonl"), batching=BatchingSection(padding_free=is_free))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    return CausalTask(TaskContext(TaskSection(name="pretrain"), data, tokenizer))


class Step:
    """A step over four samples, cut into microbatches, as the loop takes it."""

    def __init__(self, model, *, num_batches=1, coefficient: float | None = COEFFICIENT, is_free=False):
        task = causal_task(is_free=is_free)
        routed = RoutedTask(task, RoutingRecorder(model, find_routers(model)), coefficient, lambda batch: None)
        size = len(LENGTHS) // num_batches
        batches = [task.collate(features()[start : start + size]) for start in range(0, len(LENGTHS), size)]
        num_targets = sum(batch.num_targets for batch in batches)
        model.zero_grad()
        torch.manual_seed(5)
        self.batches = routed.prepare_step(model, batches)
        self.sums: list[dict[str, Tensor]] = []
        for batch in self.batches:
            self.sums.append(dict(routed.loss_sums(model, batch)))
            (self.sums[-1]["loss_sum"] / num_targets).backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        self.loss = float(self.total("loss_sum")) / num_targets

    def total(self, name: str) -> Tensor:
        return torch.stack([sums[name].detach() for sums in self.sums]).sum(dim=0)


def relative(found, wanted):
    """Return the distance of all gradients together, relative to their length."""
    assert found.keys() == wanted.keys()
    apart = torch.stack([(found[name] - each).norm() for name, each in wanted.items()]).norm()
    return float(apart / torch.stack([each.norm() for each in wanted.values()]).norm())


@pytest.mark.parametrize("model_type", SOFTMAX)
def test_loss_and_gradient_of_one_whole_batch_are_those_of_transformers(model_type):
    model = mixture(model_type)
    step = Step(model)
    batch = step.batches[0]
    model.zero_grad()
    output = model(**batch.inputs, output_router_logits=True, use_cache=False)
    assert float(step.total("router_aux_loss")) == pytest.approx(output.aux_loss.item(), rel=1e-6)
    plain = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten())
    assert step.loss == pytest.approx(plain.item(), rel=1e-6)
    (plain + COEFFICIENT * output.aux_loss).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative(step.gradients, wanted) < 1e-5


@pytest.mark.parametrize("is_free", [False, True], ids=["padded", "in one row"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_cut_of_a_step_changes_nothing(model_type, is_free):
    model = mixture(model_type)
    whole = Step(model, is_free=is_free)
    for num_batches in (2, 4):
        cut = Step(model, num_batches=num_batches, is_free=is_free)
        assert torch.equal(cut.total("tokens_per_expert"), whole.total("tokens_per_expert"))
        assert float(cut.total("router_aux_loss")) == pytest.approx(float(whole.total("router_aux_loss")), rel=1e-6)
        assert relative(cut.gradients, whole.gradients) < 1e-5
    of_each = [Step(model, num_batches=4, is_free=is_free).sums[number]["router_aux_loss"] for number in range(4)]
    assert max(of_each) > 1.5 * min(of_each)  # the microbatches do differ


@pytest.mark.parametrize("model_type", SIGMOID)
def test_routers_with_a_sigmoid_are_balanced_over_the_step_too(model_type):
    model = mixture(model_type)
    whole, cut = Step(model), Step(model, num_batches=4)
    assert float(cut.total("router_aux_loss")) == pytest.approx(float(whole.total("router_aux_loss")), rel=1e-6)
    assert relative(cut.gradients, whole.gradients) < 1e-5
    assert 2.0 < float(whole.total("router_aux_loss")) < 8.0  # two experts for a token: 2 is balance, 8 one expert
    plain = Step(model, coefficient=None)
    gate = find_routers(model)[0].name
    assert not torch.allclose(whole.gradients[f"{gate}.weight"], plain.gradients[f"{gate}.weight"], rtol=1e-3)


def test_padding_is_sent_to_experts_and_does_not_count():
    step = Step(mixture("mixtral"))
    assert step.batches[0].inputs["attention_mask"].numel() > sum(LENGTHS)
    assert step.total("tokens_per_expert").sum(dim=1).tolist() == [2 * sum(LENGTHS)] * 2  # two layers, two experts


def test_the_logged_loss_is_bitwise_that_of_the_task():
    model = mixture("mixtral")
    assert Step(model, num_batches=2).loss == Step(model, num_batches=2, coefficient=None).loss


def test_recomputed_layers_are_not_counted_twice():
    model = mixture("qwen3_moe")
    plain = Step(model, num_batches=2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = Step(model, num_batches=2)
    assert torch.equal(again.total("tokens_per_expert"), plain.total("tokens_per_expert"))
    assert relative(again.gradients, plain.gradients) < 1e-6


def test_the_pass_before_the_step_draws_the_same_random_numbers_and_leaves_them():
    model = mixture("mixtral", attention_dropout=0.3, router_jitter_noise=0.2)
    step = Step(model, num_batches=4)
    *counted, num_targets = step.batches[0].extras["router_totals"].tolist()
    assert counted == step.total("tokens_per_expert").sum(dim=0).tolist()
    assert num_targets == sum(LENGTHS) - len(LENGTHS)
    plain = Step(model, num_batches=4, coefficient=None)  # without that pass
    assert step.loss == plain.loss
    assert Step(mixture("mixtral"), num_batches=4).loss != plain.loss  # there is something to draw


def test_a_frozen_router_balances_the_layers_below_it():
    model = mixture("mixtral")
    for router in find_routers(model):
        router.module.requires_grad_(False)
    balanced, plain = Step(model), Step(model, coefficient=None)
    assert not any("gate.weight" in name for name in balanced.gradients)
    assert relative(balanced.gradients, plain.gradients) > 1e-3


def test_a_formula_that_can_be_done_in_the_head():
    tokens = torch.tensor([6.0, 2.0])  # of four tokens in one pool, two experts each
    sums = torch.tensor([3.0, 1.0])
    # N = 8 / 2 = 4; f = [1.5, 0.5]; P = [0.75, 0.25]; 2 * (1.125 + 0.125)
    assert float(load_balancing_loss(tokens, sums, top_k=2)) == 2.5
    assert float(load_balancing_loss(torch.full((4,), 5.0), torch.full((4,), 2.5), top_k=2)) == 2.0  # balance


def test_the_load_of_the_busiest_expert_and_the_idle_ones():
    assert load_metrics([[4, 4, 4, 4], [8, 8, 0, 0]]) == {"expert_load_max": 2.0, "experts_unused": 2.0}


def test_metrics_of_a_step_are_the_task_s_and_the_routers():
    model = mixture("mixtral")
    routed = RoutedTask(causal_task(), RoutingRecorder(model, find_routers(model)), 0.1, lambda batch: None)
    sums = {"loss_sum": 6.0, "cross_entropy": 4.0, "router_aux_loss": 2.5, "tokens_per_expert": [[3.0, 1.0]]}
    assert routed.step_metrics(sums, num_targets=2) == {
        **{"cross_entropy": 2.0, "router_aux_loss": 2.5},
        **{"expert_load_max": 1.5, "experts_unused": 0.0},
    }
    counted = replace(routed, coefficient=None)
    assert "router_aux_loss" not in counted.step_metrics({"tokens_per_expert": [[3.0, 1.0]]}, num_targets=2)
