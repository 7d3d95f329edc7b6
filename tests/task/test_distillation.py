"""Divergences against their formulas in float64, and what stays of a distribution of which few tokens are kept."""

import math
import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.task import DistillationSection, TaskSection
from finetune.data.batch import IGNORED
from finetune.errors import DataError
from finetune.task.distillation import (
    DistillationTask,
    divergence,
    reduce_to_top_k,
)
from finetune.task.protocol import TaskContext
from tests.refusals import refused

NAMES = ("forward_kl", "reverse_kl", "jsd")


def log_probabilities(seed, *, shape=(7, 11)):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 3).log_softmax(dim=-1)


def named(name):
    return partial(divergence, section=DistillationSection(teacher="x", divergence=name, jsd_beta=0.3))


def formula(name, teacher, student, *, beta=0.3):
    """Return the divergences as their papers write them, token after token."""
    found = []
    for p, q in zip(teacher.exp().tolist(), student.exp().tolist(), strict=True):
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]

        def kl(one, other):
            return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True))

        found.append({"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)})
    return torch.tensor([each[name] for each in found], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_a_divergence_equals_its_formula(name):
    teacher, student = log_probabilities(0), log_probabilities(1)
    torch.testing.assert_close(named(name)(teacher, student), formula(name, teacher, student), rtol=0, atol=1e-10)


def test_kept_tokens_and_the_rest_are_a_distribution():
    whole = log_probabilities(5)
    kept = whole.topk(3, dim=1).indices
    few = reduce_to_top_k(whole, kept).exp()
    assert few.shape == (7, 4)
    torch.testing.assert_close(few.sum(dim=1), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(few[:, :3], whole.exp().gather(1, kept))


def test_a_token_that_the_teacher_rules_out_costs_nothing_forwards():
    teacher = torch.tensor([[0.0, -torch.inf]])
    student = torch.tensor([[0.5, 0.5]]).log()
    assert float(named("forward_kl")(teacher, student)) == pytest.approx(0.6931, abs=1e-4)
    assert float(named("reverse_kl")(teacher, student)) == float("inf")
    assert 0 < float(named("jsd")(teacher, student)) < 0.7


ROWS = [("What is two and two?", "four"), ("two", "Two and two is four"), ("Two", "two")]


def llama(seed, tokenizer, *, more=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer) + more, initializer_range=0.5, **sizes)).eval()


@pytest.fixture(scope="module")
def student(tokenizer):
    return llama(0, tokenizer)


@pytest.fixture(scope="module")
def teacher(tokenizer):
    return llama(1, tokenizer, more=8)  # its table is padded, as Qwen's are


def made(tokenizer, data, **distillation):
    section = TaskSection(name="distillation", distillation=DistillationSection(teacher="./teacher", **distillation))
    return DistillationTask(TaskContext(section, data, tokenizer))


def samples(task):
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in ROWS]
    features = task.encode([{"messages": each} for each in turns])
    return [replace(each, sample_id=number) for number, each in enumerate(features)]


def known(task, teacher, features):
    """Return the samples with what the teacher says of them, as a run stores it."""
    answers = task.precomputed.compute(teacher, task.collate(features))
    return [replace(each, arrays={**each.arrays, **found}) for each, found in zip(features, answers, strict=True)]


def test_the_loss_is_a_mixture_of_divergence_and_cross_entropy(tokenizer, data, student, teacher):
    task = made(tokenizer, data, temperature=2.0, cross_entropy_weight=0.25).attach_teacher(teacher)
    batch = task.collate(samples(task))
    is_target = batch.labels != IGNORED
    logits = [model(**batch.inputs).logits[is_target].double() for model in (teacher, student)]
    p, q = (each[:, : len(tokenizer)].div(2.0).softmax(dim=-1) for each in logits)
    divergence = float((p * (p / q).log()).sum())
    cross_entropy = float(-logits[1].log_softmax(-1).gather(1, batch.labels[is_target][:, None]).sum())
    sums = {name: float(value) for name, value in task.metric_sums(student, batch).items()}
    assert sums["divergence"] == pytest.approx(divergence, rel=1e-5)
    assert sums["loss_sum"] == pytest.approx(0.75 * 4.0 * divergence + 0.25 * cross_entropy, rel=1e-5)
    assert float(task.loss_sums(student, batch)["loss_sum"]) == pytest.approx(sums["loss_sum"], rel=1e-6)
    metrics = task.metrics(sums)
    assert set(metrics) == {"loss", "cross_entropy", "divergence", "perplexity", "token_accuracy"}
    assert metrics["cross_entropy"] == pytest.approx(cross_entropy / batch.num_targets, rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_kept_answers_give_the_loss_and_gradient_of_live_ones(tokenizer, data, student, teacher, divergence):
    settings = {"divergence": divergence, "top_k": 5, "temperature": 1.5}
    live = made(tokenizer, data, **settings).attach_teacher(teacher)
    kept = made(tokenizer, data, **settings, cache=True)
    gradients, losses = [], []
    for task, features in ((live, samples(live)), (kept, known(kept, teacher, samples(kept)))):
        student.zero_grad()
        loss = task.loss_sums(student, task.collate(features))["loss_sum"]
        loss.backward()
        losses.append(float(loss))
        gradients.append(student.lm_head.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


def test_a_filler_counts_nothing_and_knows_nothing(tokenizer, data, student, teacher):
    task = made(tokenizer, data, top_k=5, cache=True)
    (first, *_) = known(task, teacher, samples(task))
    sums = task.metric_sums(student, task.dummy_batch(first))
    assert {name: float(value) for name, value in sums.items()} == dict.fromkeys(sums, 0.0)
    assert task.precomputed.compute(teacher, task.dummy_batch(first)) is not None


def test_answers_are_kept_for_the_settings_that_decide_them(tokenizer, data):
    first, hotter = (made(tokenizer, data, top_k=5, cache=True, temperature=each).precomputed for each in (1.0, 2.0))
    assert first.scorer == "teacher"
    assert first.identity != hotter.identity
    assert made(tokenizer, data, top_k=5).precomputed is None


def test_a_loaders_process_is_sent_no_teacher(tokenizer, data, teacher):
    task = made(tokenizer, data).attach_teacher(teacher)
    assert pickle.loads(pickle.dumps(task))._teacher is None


def test_to_keep_as_many_tokens_as_there_are_is_refused(tokenizer, data):
    with refused(DataError, "task.distillation.top_k: "):
        made(tokenizer, data, top_k=len(tokenizer))
