import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.errors import DataError
from finetune.task.answer_pairs import (
    PAIR_WEIGHTS,
    collate_pairs,
    join_halves,
    num_target_tokens,
    scores,
    select_half,
    sequence_log_probabilities,
    split_by_sample,
)
from tests.refusals import pinned
from tests.small_models import TINY
from tests.task.pairs_of_words import ANSWERS, PAIRS, encoded, pair, task_of


def sample(*sequences: tuple[list[int], int], sample_id: int = 0) -> Features:
    """Return a sample of sequences, each its tokens and how many of the last are targets."""
    ids = np.array([token for tokens, _ in sequences for token in tokens], np.uint32)
    targets = [place >= len(tokens) - num for tokens, num in sequences for place in range(len(tokens))]
    lengths = np.array([len(tokens) for tokens, _ in sequences], np.int32)
    return Features({"input_ids": ids, "is_target": np.array(targets), LENGTHS_OF_SEQUENCES: lengths}, sample_id)


PAIR = sample(([5, 6, 7, 8], 2), ([5, 6, 9], 1), sample_id=3)
OTHER = sample(([10, 11], 1), ([10, 12, 13], 2), sample_id=4)
FOUR = sample(([5, 6], 1), ([5, 7], 1), ([5, 8], 1), ([5, 9], 1), sample_id=5)


def test_first_halves_of_all_samples_stand_above_the_second_halves():
    batch = collate_pairs([PAIR, OTHER], pad_id=0)
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8], [10, 11, 0, 0], [5, 6, 9, 0], [10, 12, 13, 0]]
    assert (batch.num_targets, batch.num_tokens, batch.sample_ids) == (2, 12, (3, 4))
    assert num_target_tokens(batch).tolist() == [2, 1, 1, 2]
    assert batch.extras[PAIR_WEIGHTS].tolist() == [1, 1]


def test_values_go_into_halves_and_back_by_sample():
    batch = collate_pairs([PAIR, FOUR], pad_id=0)
    values = [np.array([1.0, 2.0]), np.array([3.0, 4.0, 5.0, 6.0])]
    placed = join_halves(values)
    assert placed.tolist() == [1, 3, 4, 2, 5, 6]
    assert [each.tolist() for each in split_by_sample(placed, batch)] == [[1, 2], [3, 4, 5, 6]]


def test_log_probabilities_are_those_of_each_sequence_alone(model):
    batch = collate_pairs([PAIR, OTHER], pad_id=0)
    with torch.no_grad():
        together = sequence_log_probabilities(model, batch)
        for row, (tokens, num) in enumerate((([5, 6, 7, 8], 2), ([10, 11], 1), ([5, 6, 9], 1), ([10, 12, 13], 2))):
            each = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
            alone = sum(each[t - 1, tokens[t]] for t in range(len(tokens) - num, len(tokens)))
            assert together[row].item() == pytest.approx(alone.item(), abs=1e-4)


def test_log_probabilities_of_both_halves_of_a_batch_equal_those_of_the_whole(model):
    batch = collate_pairs([PAIR, OTHER], pad_id=0)
    with torch.no_grad():
        whole = sequence_log_probabilities(model, batch)
        parts = [sequence_log_probabilities(model, select_half(batch, lower=lower)) for lower in (False, True)]
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.fixture
def scorer(tokenizer, data):
    head = task_of(tokenizer, data, "reward").head_values
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, vocab_size=len(tokenizer), initializer_range=0.3, **head)
    return LlamaForSequenceClassification(config).eval()


def test_a_reward_score_does_not_depend_on_padding(tokenizer, data, scorer):
    """The tokenizer pads with its end-of-sequence token."""
    task = task_of(tokenizer, data, "reward")
    assert tokenizer.pad_token_id is None
    assert scorer.config.pad_token_id == tokenizer.eos_token_id
    batch = task.collate(encoded(task, PAIRS))
    with torch.no_grad():
        together = scores(scorer, batch)
        for row, answers in enumerate(zip(*ANSWERS, strict=True)):
            for place, answer in enumerate(answers):
                turns = [*PAIRS[0]["prompt"], {"role": "assistant", "content": answer}]
                ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
                alone = scorer(ids).logits[0, 0].item()
                assert together[row * len(ANSWERS) + place].item() == pytest.approx(alone, abs=1e-4)


def test_margins_of_the_rows_make_the_loss_larger(tokenizer, data, scorer):
    rows = [{**row, "margin": 2.0} for row in PAIRS]
    plain, wide = task_of(tokenizer, data, "reward"), task_of(tokenizer, data, "reward", use_margin=True)
    with torch.no_grad():
        narrow = plain.loss_sums(scorer, plain.collate(encoded(plain, rows)))["loss_sum"]
        assert wide.loss_sums(scorer, wide.collate(encoded(wide, rows)))["loss_sum"] > narrow
    assert plain.samples.identity == {}
    assert wide.samples.identity == {"margin": True}


def test_a_row_without_the_required_margin_is_rejected(tokenizer, data):
    (wrong,) = task_of(tokenizer, data, "reward", use_margin=True).encode([pair("four", "two")])
    assert isinstance(wrong, DataError)
    pinned(wrong, "`margin`")


def test_metrics_are_means_over_pairs(tokenizer, data, scorer):
    task = task_of(tokenizer, data, "reward")
    with torch.no_grad():
        sums = task.metric_sums(scorer, task.collate(encoded(task, PAIRS)))
    metrics = task.metrics({name: value.item() for name, value in sums.items()})
    assert set(metrics) == {"loss", "preference_accuracy", "reward_margin", "reward_chosen", "reward_rejected"}
    assert metrics["reward_margin"] == pytest.approx(metrics["reward_chosen"] - metrics["reward_rejected"], abs=1e-5)
