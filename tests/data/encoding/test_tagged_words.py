"""Tagged words: the first token of each carries its tag, and no word is lost."""

import pickle

import pytest

from finetune.data.classes import Classes
from finetune.data.encoding.tagged_words import TaggedWordsEncoder
from finetune.errors import DataError
from tests.data.encoding.word_pieces import WORDS, bert_tokenizer

CLASSES = Classes(("O", "B-LOC", "I-LOC"))


@pytest.fixture
def encoder():
    return pickle.loads(pickle.dumps(TaggedWordsEncoder(bert_tokenizer(), CLASSES)))


def shown(features, words):
    """Return each token, with its tag where it is a target: `a/O`."""
    arrays = features.arrays
    tokens = zip(arrays["input_ids"], arrays["is_target"], arrays["labels"], strict=True)
    return " ".join(f"{words[i]}/{CLASSES.names[label]}" if is_target else words[i] for i, is_target, label in tokens)


def test_the_first_token_of_a_word_carries_its_tag(encoder):
    (sample,) = encoder([{"tokens": ["playing", "New", "York", "!"], "tags": ["O", "B-LOC", "I-LOC", "O"]}])
    assert shown(sample, WORDS) == "[CLS] play/O ##ing new/B-LOC york/I-LOC !/O [SEP]"
    assert next(iter(sample.arrays)) == "input_ids"
    assert sample.num_targets == 4


def test_the_same_word_twice_is_two_words(encoder):
    (sample,) = encoder([{"tokens": ["a", "a"], "tags": ["O", "B-LOC"]}])
    assert shown(sample, WORDS) == "[CLS] a/O a/B-LOC [SEP]"


def test_a_word_without_tokens_becomes_the_unknown_token(encoder):
    (sample,) = encoder([{"tokens": ["a", "\u200b", "b"], "tags": ["O", "B-LOC", "O"]}])
    assert shown(sample, WORDS) == "[CLS] a/O [UNK]/B-LOC b/O [SEP]"


def test_words_of_a_byte_level_tokenizer_stay_separate(tokenizer):
    (sample,) = TaggedWordsEncoder(tokenizer, CLASSES)([{"tokens": ["Be", "brief"], "tags": ["O", "B-LOC"]}])
    assert tokenizer.decode(sample.arrays["input_ids"].tolist()) == "Be brief"
    assert sample.num_targets == 2


def test_a_word_without_tokens_is_rejected_if_there_is_no_unknown_token(tokenizer):
    (outcome,) = TaggedWordsEncoder(tokenizer, CLASSES)([{"tokens": ["", "a"], "tags": ["O", "O"]}])
    assert "word 1 ('') leaves no token" in str(outcome)


def test_rows_without_words_or_with_unknown_tags(encoder):
    empty, wrong, other = encoder([{"tokens": [], "tags": []}, {"tokens": ["a"], "tags": ["X"]}, {"text": "a"}])
    assert empty is None
    assert "no class `X`; there are `O`, `B-LOC`, `I-LOC`" in str(wrong)
    assert "Use `format: tagged`" in str(other)


def test_a_tokenizer_without_word_boundaries_is_rejected():
    class Slow:
        is_fast = False

    with pytest.raises(DataError, match=r"the tokenizer \(Slow\) is written in Python and cannot tell which word"):
        TaggedWordsEncoder(Slow(), CLASSES)
