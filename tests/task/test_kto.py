import copy

import pytest
import torch

from finetune.task.preference import REFERENCE_POINT, win_rate
from tests.task.pairs_of_words import JUDGED, PAIRS, encoded, nudged, task_of


@pytest.fixture
def task(tokenizer, data):
    return task_of(tokenizer, data, "preference", loss="kto", beta=0.5, desirable_weight=1.3)


@pytest.fixture
def moved(model):
    return nudged(copy.deepcopy(model), by=0.02)


def step(task, model, cuts):
    """Return the summed loss of a step of these microbatches, and their reference points."""
    with torch.no_grad():
        batches = task.prepare_step(model, [task.collate(cut) for cut in cuts])
        losses = [task.loss_sums(model, batch)["loss_sum"].item() for batch in batches]
    return sum(losses), [batch.extras[REFERENCE_POINT].item() for batch in batches]


@pytest.mark.parametrize("rows", [JUDGED, PAIRS + JUDGED[:3]], ids=["judged", "pairs and judged"])
def test_the_reference_point_is_of_the_step_however_that_is_cut(task, model, moved, rows):
    samples = encoded(task, rows, model)
    for policy, reference in ((moved, model), (model, moved)):  # one of both moves has a reference point above zero
        samples = encoded(task, rows, reference)
        whole, (point,) = step(task, policy, [samples])
        cut, points = step(task, policy, [samples[:1], samples[1:4], samples[4:]])
        assert points == pytest.approx([point] * 3, abs=1e-4)
        assert cut == pytest.approx(whole, rel=1e-4)


def test_preparing_a_kto_step_does_not_change_gradients_or_training_mode(task, model):
    samples = encoded(task, JUDGED, model)
    model.train()
    task.prepare_step(model, [task.collate(samples)])
    assert model.training
    assert all(each.grad is None for each in model.parameters())
    model.eval()


def test_evaluation_loss_equals_that_of_one_batch_of_all_rows(task, model, moved):
    samples = encoded(task, JUDGED, model)
    with torch.no_grad():
        parts = [task.evaluate_batch(moved, task.collate(cut)) for cut in (samples[:3], samples[3:])]
        filler = task.evaluate_batch(moved, task.dummy_batch(samples[0]))
        whole = task.loss_sums(moved, task.collate(samples))["loss_sum"].item()
    assert filler.records.shape == (0, 4)
    metrics = task.metrics({}, torch.cat([part.records for part in (*parts, filler)]))
    assert metrics["loss"] == pytest.approx(whole / len(JUDGED), rel=1e-4)
    assert metrics["reward_margin"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"])


def test_a_pair_is_two_judged_answers(task, model):
    batch = task.collate(encoded(task, PAIRS, model))
    assert batch.num_targets == 8
    with torch.no_grad():
        sums = {name: value.item() for name, value in task.loss_sums(model, batch).items()}
    assert (sums["num_good"], sums["num_bad"]) == (4, 4)
    del sums["loss_sum"]
    assert set(task.step_metrics(sums, num_targets=8)) == {
        *("reference_point", "reward_chosen", "reward_rejected", "reward_margin"),
        *("log_probability_chosen", "log_probability_rejected"),
    }


def test_wins_are_counted_over_all_couples():
    good, bad = torch.tensor([3.0, 1.0]), torch.tensor([1.0, 0.0, 2.0])
    assert win_rate(good, bad).item() == pytest.approx((3 + 1.5) / 6)
    assert win_rate(good, bad[:0]).isnan()
