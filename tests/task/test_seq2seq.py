"""Sequences to sequences: sources and targets, what the decoder is given, and answers token by token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from finetune.config.sections.task import Seq2SeqSection, TaskSection
from finetune.data.batch import IGNORED
from finetune.errors import DataError
from finetune.task.causal_lm import Seq2SeqTask
from finetune.task.generation import generate_tokens
from finetune.task.protocol import TaskContext
from tests.refusals import pinned

SIZE = 320
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "initializer_factor": 2.0}
BART = {f"{part}_{name}": 1 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
BART |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.3}
MODELS = {
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=SIZE, **T5, dropout_rate=0.0, decoder_start_token_id=0)
    ),
    "bart": lambda: BartForConditionalGeneration(BartConfig(vocab_size=SIZE, **BART)),
}


@pytest.fixture(scope="module", params=sorted(MODELS))
def pair(request):
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def exchange(asked, answered):
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": turns}


def made(tokenizer, data, **seq2seq):
    return Seq2SeqTask(TaskContext(TaskSection(name="seq2seq", seq2seq=Seq2SeqSection(**seq2seq)), data, tokenizer))


def samples(task, *rows):
    return [
        replace(each, sample_id=number) for number, each in enumerate(task.encode([exchange(*row) for row in rows]))
    ]


def test_a_row_becomes_source_and_target_ended_by_end_of_sequence(tokenizer, data):
    task = made(tokenizer, data, source_prefix="answer: ")
    (features,) = samples(task, ("What is two?", "Two and two"))
    ids, is_target = features.arrays["input_ids"], features.arrays["is_target"]
    assert tokenizer.decode(ids[~is_target]) == "answer: What is two?"
    assert tokenizer.decode(ids[is_target]) == "Two and two<|endoftext|>"
    assert features.num_targets == int(is_target.sum())


def test_the_source_is_padded_and_padded_targets_do_not_count(tokenizer, data):
    task = made(tokenizer, data)
    batch = task.collate(samples(task, ("What is two and two?", "four"), ("two", "Two and")))
    assert batch.labels.shape[1] != batch.inputs["input_ids"].shape[1]
    assert batch.num_targets == int((batch.labels != IGNORED).sum())
    assert batch.inputs["attention_mask"][1].tolist()[-1] == 0
    assert int((batch.labels == tokenizer.eos_token_id).sum()) == 2  # although it is the padding, too


def test_the_summed_loss_is_the_models_own_mean_times_the_targets(tokenizer, data, pair):
    task = made(tokenizer, data)
    batch = task.collate(samples(task, ("What is two and two?", "four"), ("two", "Two and two is four")))
    theirs = pair(**batch.inputs, labels=batch.labels).loss * batch.num_targets
    assert float(task.loss_sums(pair, batch)["loss_sum"]) == pytest.approx(float(theirs), rel=1e-5)
    filler = task.dummy_batch(samples(task, ("two", "four"))[0])
    assert filler.num_targets == 0
    assert float(task.loss_sums(pair, filler)["loss_sum"]) == 0.0


def test_answers_are_those_of_transformers_generate(tokenizer, data, pair):
    task = made(tokenizer, data)
    prompts = [task.prompt(each) for each in samples(task, ("What is two and two?", "x"), ("two", "y"))]
    eos = tokenizer.eos_token_id
    settings = {"pad_id": eos, "stop_ids": frozenset({eos}), "max_new_tokens": 6, "device": torch.device("cpu")}
    for prompt, answer in zip(prompts, generate_tokens(pair, prompts, **settings), strict=True):
        theirs = pair.generate(
            input_ids=torch.tensor([prompt.input_ids]),
            max_new_tokens=6,
            do_sample=False,
            num_beams=1,
            eos_token_id=eos,
            forced_eos_token_id=None,
        )
        assert theirs[0, 1:].tolist()[: len(answer)] == answer


def test_source_and_target_have_lengths_of_their_own(tokenizer, data):
    short = data.model_copy(update={"max_length": 5, "over_length": "truncate"})
    task = made(tokenizer, short, max_target_length=3)
    (fits, long) = samples(task, ("two", "a"), ("What is two and two?", "Two and two is four"))
    assert task.samples.length_limit.fits(fits)
    assert not task.samples.length_limit.fits(long)
    (cut,), counts = task.samples.length_limit.shorten(long)
    assert (cut.length - cut.num_targets, cut.num_targets) == (5, 3)
    assert np.array_equal(cut.arrays["input_ids"][:5], long.arrays["input_ids"][:5])
    assert counts.truncated_rows == 1
    assert counts.truncated_targets == long.num_targets - 3
    dropping = made(tokenizer, short.model_copy(update={"over_length": "drop"}), max_target_length=3)
    assert dropping.samples.length_limit.shorten(long)[1].dropped_targets == long.num_targets
    assert "task.seq2seq.max_target_length: 3" in dropping.samples.length_limit.limits


def test_seq2seq_rejects_rows_that_are_not_one_exchange_with_a_remedy(tokenizer, data):
    task = made(tokenizer, data)
    two = {"messages": [*exchange("a", "b")["messages"], *exchange("c", "d")["messages"]]}
    empty, several, tools, text = task.encode(
        [exchange("", "b"), two, {**exchange("a", "b"), "tools": [{}]}, {"text": "a"}]
    )
    assert empty is None
    assert isinstance(text, DataError)
    pinned(several, "user, assistant, user, assistant")
    pinned(tools, "tools")
    pinned(text, "prompt_completion")


def test_prefix_and_maximum_target_length_are_part_of_the_encoding_identity(tokenizer, data):
    assert made(tokenizer, data, source_prefix="a").samples.identity != made(tokenizer, data).samples.identity
    assert made(tokenizer, data, max_target_length=9).samples.identity != made(tokenizer, data).samples.identity
