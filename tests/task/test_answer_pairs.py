import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from finetune.errors import DataError
from finetune.task.answer_pairs import (
    scores,
)
from tests.refusals import pinned
from tests.small_models import TINY
from tests.task.pairs_of_words import ANSWERS, PAIRS, encoded, pair, task_of


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
