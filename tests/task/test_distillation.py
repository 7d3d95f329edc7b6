"""Distillation: the loss against its formula, and that answers which were kept are those that are asked live."""

import pickle
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.task import DistillationSection, TaskSection
from finetune.data.batch import IGNORED
from finetune.errors import DataError
from finetune.task.distillation import DistillationTask
from finetune.task.materials import Materials

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
    return DistillationTask(Materials(section, data, tokenizer))


def samples(task):
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in ROWS]
    features = task.encode([{"messages": each} for each in turns])
    return [replace(each, sample_id=number) for number, each in enumerate(features)]


def known(task, teacher, features):
    """Return the samples with what the teacher says of them, as a run stores it."""
    answers = task.prior.work_out(teacher, task.collate(features))
    return [replace(each, arrays={**each.arrays, **found}) for each, found in zip(features, answers, strict=True)]


def test_the_loss_is_a_mixture_of_divergence_and_cross_entropy(tokenizer, data, student, teacher):
    task = made(tokenizer, data, temperature=2.0, cross_entropy_weight=0.25).taught_by(teacher)
    batch = task.collate(samples(task))
    is_target = batch.labels != IGNORED
    logits = [model(**batch.inputs).logits[is_target].double() for model in (teacher, student)]
    p, q = (each[:, : len(tokenizer)].div(2.0).softmax(dim=-1) for each in logits)
    divergence = float((p * (p / q).log()).sum())
    cross_entropy = float(-logits[1].log_softmax(-1).gather(1, batch.labels[is_target][:, None]).sum())
    sums = {name: float(value) for name, value in task.metric_sums(student, batch).items()}
    assert sums["divergence"] == pytest.approx(divergence, rel=1e-5)
    assert sums["loss_sum"] == pytest.approx(0.75 * 4.0 * divergence + 0.25 * cross_entropy, rel=1e-5)
    assert float(task.loss_sum(student, batch)) == pytest.approx(sums["loss_sum"], rel=1e-6)
    metrics = task.metrics(sums)
    assert set(metrics) == {"loss", "cross_entropy", "divergence", "perplexity", "token_accuracy"}
    assert metrics["cross_entropy"] == pytest.approx(cross_entropy / batch.num_targets, rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_kept_answers_give_the_loss_and_gradient_of_live_ones(tokenizer, data, student, teacher, divergence):
    settings = {"divergence": divergence, "top_k": 5, "temperature": 1.5}
    live = made(tokenizer, data, **settings).taught_by(teacher)
    kept = made(tokenizer, data, **settings, cache=True)
    gradients, losses = [], []
    for task, features in ((live, samples(live)), (kept, known(kept, teacher, samples(kept)))):
        student.zero_grad()
        loss = task.loss_sum(student, task.collate(features))
        loss.backward()
        losses.append(float(loss))
        gradients.append(student.lm_head.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(tokenizer, data, student, divergence, top_k):
    task = made(tokenizer, data, divergence=divergence, top_k=top_k).taught_by(student)
    student.zero_grad()
    loss = task.loss_sum(student, task.collate(samples(task)))
    loss.backward()
    assert abs(float(loss)) < 1e-5
    assert max(float(each.grad.abs().max()) for each in student.parameters()) < 1e-5


def test_a_filler_counts_nothing_and_knows_nothing(tokenizer, data, student, teacher):
    task = made(tokenizer, data, top_k=5, cache=True)
    (first, *_) = known(task, teacher, samples(task))
    sums = task.metric_sums(student, task.filler(first))
    assert {name: float(value) for name, value in sums.items()} == dict.fromkeys(sums, 0.0)
    assert task.prior.work_out(teacher, task.filler(first)) is not None


def test_answers_are_kept_for_the_settings_that_decide_them(tokenizer, data):
    first, hotter = (made(tokenizer, data, top_k=5, cache=True, temperature=each).prior for each in (1.0, 2.0))
    assert first.knower == "teacher"
    assert first.identity != hotter.identity
    assert made(tokenizer, data, top_k=5).prior is None


def test_a_loaders_process_is_sent_no_teacher(tokenizer, data, teacher):
    task = made(tokenizer, data).taught_by(teacher)
    assert pickle.loads(pickle.dumps(task))._teacher is None


def test_to_keep_as_many_tokens_as_there_are_is_refused(tokenizer, data):
    with pytest.raises(DataError, match="Remove it"):
        made(tokenizer, data, top_k=len(tokenizer))
