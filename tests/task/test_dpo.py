import copy
import math

import pytest
import torch

from finetune.errors import DataError
from finetune.registry.losses import PAIRS_TASK, PREFERENCE_LOSSES
from tests.refusals import pinned
from tests.task.pairs_of_words import PAIRS, encoded, judged, nudged, pair, task_of


@pytest.fixture
def moved(model):
    return nudged(copy.deepcopy(model), by=0.02)


LOSSES_OF_PAIRS = [entry.name for entry in PREFERENCE_LOSSES if entry.task == PAIRS_TASK]


@pytest.mark.parametrize("loss", LOSSES_OF_PAIRS)
def test_a_batch_may_be_cut_anywhere(tokenizer, data, model, moved, loss):
    task = task_of(tokenizer, data, "preference", loss=loss, beta=0.5)
    samples = encoded(task, PAIRS, model)
    with torch.no_grad():
        whole = task.loss_sums(moved, task.collate(samples))
        parts = [task.loss_sums(moved, task.collate(cut)) for cut in (samples[:1], samples[1:3], samples[3:])]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-4, abs=1e-4)


def test_a_model_that_is_its_own_reference_loses_the_logarithm_of_two(tokenizer, data, model):
    task = task_of(tokenizer, data, "preference")
    samples = encoded(task, PAIRS, model)
    batch = task.collate(samples)
    assert batch.num_targets == batch.num_targets == 4
    with torch.no_grad():
        sums = {name: value.item() for name, value in task.metric_sums(model, batch).items()}
    metrics = task.metrics(sums)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["reward_margin"] == pytest.approx(0, abs=1e-4)
    assert set(metrics) == {
        *("loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected"),
        *("log_probability_chosen", "log_probability_rejected"),
    }
    steps = task.step_metrics({name: value for name, value in sums.items() if name != "num_pairs"}, num_targets=4)
    assert steps == {name: value for name, value in metrics.items() if name != "loss"}


def test_orpo_and_cpo_include_the_cross_entropy_of_the_answer_unless_its_weight_is_set(tokenizer, data, model):
    def loss(**section) -> float:
        task = task_of(tokenizer, data, "preference", **section)
        with torch.no_grad():
            return task.loss_sums(model, task.collate(encoded(task, PAIRS, model)))["loss_sum"].item()

    for name in ("orpo", "cpo"):
        assert loss(loss=name) == pytest.approx(loss(loss=name, sft_weight=1.0))
        assert loss(loss=name) > loss(loss=name, sft_weight=0.0)
    assert loss(loss="simpo") == pytest.approx(loss(loss="simpo", sft_weight=0.0))


def test_a_filler_counts_for_nothing(tokenizer, data, model):
    task = task_of(tokenizer, data, "preference")
    filler = task.dummy_batch(encoded(task, PAIRS[:1], model)[0])
    assert (filler.num_targets, filler.sample_ids) == (0, ())
    with torch.no_grad():
        sums = task.metric_sums(model, filler)
    assert {name: value.item() for name, value in sums.items()} == dict.fromkeys(sums, 0)
    assert math.isnan(task.metrics({name: value.item() for name, value in sums.items()})["loss"])


def test_only_losses_with_a_reference_ask_for_one(tokenizer, data):
    asks = {
        loss: task_of(tokenizer, data, "preference", loss=loss).precomputed is not None
        for loss in ("sigmoid", "hinge", "ipo", "robust", "kto", "orpo", "simpo", "cpo")
    }
    assert [loss for loss, does in asks.items() if does] == ["sigmoid", "hinge", "ipo", "robust", "kto"]


def test_a_single_judged_answer_is_rejected_by_preference_tasks_with_the_right_task(tokenizer, data):
    (wrong,) = task_of(tokenizer, data, "preference").encode([judged("four", is_good=True)])
    assert isinstance(wrong, DataError)
    pinned(wrong)


def test_a_pair_of_equal_answers_is_not_a_sample(tokenizer, data):
    assert task_of(tokenizer, data, "preference").encode([pair("four", "four")]) == [None]
