"""The loss of a step depends on no microbatch: value and gradient are those of all texts in one graph."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoTokenizer

from finetune.data.encoding.tokenizer import append_eos, ends_with_eos
from finetune.errors import DataError
from finetune.model.activations import enable_gradient_checkpointing
from finetune.runtime import seeds
from finetune.task.embedding.embedding import pooled_vectors
from tests.refusals import pinned
from tests.task.embedding.conftest import ROWS, SCORED

LOSSES = {
    "infonce": {"temperature": 0.2},
    "both directions": {"temperature": 0.2, "symmetric": True},
    "matryoshka": {"temperature": 0.2, "matryoshka_dims": (16, 4)},
    "dot products": {"temperature": 5.0, "normalize": False},
    "cosent": {"loss": "cosent", "matryoshka_dims": (8,)},
    "cosine_mse": {"loss": "cosine_mse"},
}
CUTS = {"one": [8], "even": [4, 4], "uneven": [1, 3, 4], "each": [1] * 8}


def rows_of(section):
    return ROWS if section.get("loss", "infonce") == "infonce" else SCORED


def encoded(task, rows):
    outcomes = task.encode(rows)
    assert not any(isinstance(each, DataError | None) for each in outcomes), outcomes
    return [replace(each, sample_id=number) for number, each in enumerate(outcomes)]


def step(task, model, sizes, rows):
    """Return loss and gradients of a step that is cut into microbatches of these sizes, as the loop takes it."""
    samples, batches, start = encoded(task, rows), [], 0
    for size in sizes:
        batches.append(task.collate(samples[start : start + size]))
        start += size
    model.zero_grad()
    seeds.seed_everything(3)
    total = 0.0
    for batch in task.prepare_step(model, batches):
        loss_sum = task.loss_sums(model, batch)["loss_sum"]
        total += loss_sum.item()
        loss_sum.backward()
    return total, torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_may_be_cut_anywhere(embedding, encoder, name, cut):
    task, rows = embedding(**LOSSES[name]), rows_of(LOSSES[name])
    whole, gradient = step(task, encoder.train(), [8], rows)
    found, cut_gradient = step(task, encoder, CUTS[cut], rows)
    assert found == pytest.approx(whole, rel=1e-5)
    assert torch.allclose(cut_gradient, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


@pytest.mark.parametrize("cut", ["one", "uneven"])
def test_infonce_is_the_cross_entropy_over_all_passages_but_those_that_are_right(embedding, encoder, cut):
    task = embedding(temperature=0.2, symmetric=True)
    samples = encoded(task, ROWS)
    vectors = normalize(pooled_vectors(encoder, task.collate(samples), "mean"))
    anchors, passages = vectors[:8], vectors[8:]
    negatives = ["five", "three", "six", "is four", "two"]
    texts = [*(row["positive"] for row in ROWS), *negatives]
    right = {row["anchor"]: {each["positive"] for each in ROWS if each["anchor"] == row["anchor"]} for row in ROWS}
    mask = torch.tensor(
        [[j != i and text in right[row["anchor"]] for j, text in enumerate(texts)] for i, row in enumerate(ROWS)]
    )
    back = torch.tensor(
        [
            [j != i and row["positive"] in right[other["anchor"]] for j, other in enumerate(ROWS)]
            for i, row in enumerate(ROWS)
        ]
    )
    assert (int(mask.sum()), int(back.sum())) == (9, 5)
    similar = anchors @ passages.T / 0.2
    own = torch.arange(8)
    forward = cross_entropy(similar.masked_fill(mask, -torch.inf), own, reduction="sum")
    backward = cross_entropy(similar[:, :8].T.masked_fill(back, -torch.inf), own, reduction="sum")
    encoder.zero_grad()
    ((forward + backward) / 2).backward()
    expected = torch.cat([each.grad.flatten() for each in encoder.parameters() if each.grad is not None])
    total, gradient = step(task, encoder, CUTS[cut], ROWS)
    assert total == pytest.approx(((forward + backward) / 2).item(), rel=1e-5)
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    (batch,) = task.prepare_step(encoder, [task.collate(samples)])
    assert task.loss_sums(encoder, batch)["masked_duplicates"].item() == 9


@pytest.mark.parametrize("checkpointing", [False, True])
def test_both_passes_draw_the_same_dropout(embedding, encoder, checkpointing):
    """Against the graph of all microbatches at once, whose forward passes draw the same numbers."""
    model = copy.deepcopy(encoder)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    if checkpointing:
        enable_gradient_checkpointing(model, True)
    task = embedding(temperature=0.2)
    samples, sizes = encoded(task, ROWS), [3, 3, 2]
    total, gradient = step(task, model.train(), sizes, ROWS)
    again, _ = step(task, model, sizes, ROWS)
    assert again == total
    plain, _ = step(task, model.eval(), sizes, ROWS)
    assert abs(plain - total) > 0.01
    model.train().zero_grad()
    seeds.seed_everything(3)
    parts = [task.collate(samples[a:b]) for a, b in ((0, 3), (3, 6), (6, 8))]
    vectors = [pooled_vectors(model, part, "mean") for part in parts]
    leaf = torch.cat(vectors).detach()
    found = task.loss(leaf, parts)
    torch.cat(vectors).backward(found.gradient)
    expected = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    assert total == pytest.approx(found.row_losses.sum().item(), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


def test_one_microbatch_takes_one_pass(embedding, encoder, monkeypatch):
    task = embedding()
    calls = []
    usual = type(encoder).forward
    monkeypatch.setattr(type(encoder), "forward", lambda *a, **k: calls.append(0) or usual(*a, **k))
    step(task, encoder, [8], ROWS)
    assert len(calls) == 1
    step(task, encoder, [4, 4], ROWS)
    assert len(calls) == 1 + 4


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_a_vector_does_not_depend_on_padding(embedding, encoder, decoder, pooling):
    task = embedding(pooling=pooling)
    model = (decoder if pooling == "last_token" else encoder).eval()
    samples = encoded(task, ROWS)
    with torch.no_grad():
        together = pooled_vectors(model, task.collate(samples), pooling)
        for place, sample in enumerate(samples):
            alone = pooled_vectors(model, task.collate([sample]), pooling)
            torch.testing.assert_close(together[place], alone[0], rtol=1e-4, atol=1e-5)
            ids = torch.from_numpy(sample.arrays["input_ids"][: sample.arrays["sequence_lengths"][0]].astype(np.int64))
            states = model(input_ids=ids[None]).last_hidden_state[0]
            expected = {"mean": states.mean(dim=0), "cls": states[0], "last_token": states[-1]}[pooling]
            torch.testing.assert_close(together[place], expected, rtol=1e-4, atol=1e-5)


def test_the_last_token_is_end_of_sequence_also_of_a_saved_tokenizer(embedding, tokenizer, tmp_path):
    assert not ends_with_eos(tokenizer)
    task = embedding(pooling="last_token")
    sample = encoded(task, ROWS[:1])[0]
    ends = np.cumsum(sample.arrays["sequence_lengths"]) - 1
    assert (sample.arrays["input_ids"][ends] == tokenizer.eos_token_id).all()
    append_eos(tokenizer)  # a second time changes nothing
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("two and two")["input_ids"] == tokenizer("two and two")["input_ids"]
    assert again("two and two")["input_ids"].count(tokenizer.eos_token_id) == 1


def test_prompts_stand_before_the_texts(embedding, tokenizer):
    task = embedding(prompts={"query": "What is ", "passage": "four "})
    (sample,) = encoded(task, ROWS[:1])
    text = tokenizer.decode(sample.arrays["input_ids"])
    assert text == "What is two and twofour fourfour five"
    assert task.samples.identity["prompts"] == ["What is ", "four "]
    assert task.label_text(sample).startswith("anchor of ")


def test_metrics_are_of_all_texts_once_however_they_are_cut(embedding, encoder):
    task = embedding(temperature=0.2, matryoshka_dims=(8,))
    samples = encoded(task, ROWS)
    encoder.eval()

    def measured(*sizes):
        records, start = [], 0
        with torch.no_grad():
            for size in sizes:
                records.append(task.evaluate_batch(encoder, task.collate(samples[start : start + size])).records)
                start += size
        together = torch.cat(records)
        return task.metrics({}, together[together[:, 0].argsort(stable=True)])

    whole, cut = measured(8), measured(2, 5, 1)
    assert whole == pytest.approx(cut, rel=1e-5)
    assert {"loss", "recall_at_1", "recall_at_5", "recall_at_10", "ndcg_at_10", "mrr_at_10"} <= whole.keys()
    assert {"ndcg_at_10_dim_8"} <= whole.keys()
    with torch.no_grad():
        one = task.loss_sums(encoder, task.collate(samples))["loss_sum"].item() / 8
    assert whole["loss"] == pytest.approx(one, rel=1e-5)
    dummy = task.dummy_batch(samples[0])
    assert (dummy.num_targets, task.evaluate_batch(encoder, dummy).records) == (0, None)


def test_scores_are_correlated_and_out_of_range_they_are_refused(embedding, encoder):
    task = embedding(loss="cosine_mse")
    samples = encoded(task, SCORED)
    with torch.no_grad():
        found = task.metrics({}, task.evaluate_batch(encoder.eval(), task.collate(samples)).records)
        loss = task.loss_sums(encoder, task.collate(samples))["loss_sum"].item() / 8
    assert found["loss"] == pytest.approx(found["mse"]) == pytest.approx(loss, rel=1e-5)
    assert -1 <= found["spearman"] <= 1
    (wrong,) = task.encode([{**SCORED[0], "score": 4.0}])
    pinned(wrong, "-1 to 1")
    (other,) = task.encode(ROWS[:1])
    pinned(other, "format: scored_pairs")
    (pair,) = embedding().encode(SCORED[:1])
    pinned(pair, "format: pairs")


def test_a_blank_text_is_not_a_sample(embedding):
    assert embedding().encode([{"anchor": " ", "positive": "four", "negatives": []}]) == [None]
