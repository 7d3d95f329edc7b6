"""Labelled texts become framed tokens and labels; what is too long keeps its special tokens."""

import pickle

import pytest

from finetune.data.encoding.labelled import (
    Classes,
    ClassLabelEncoder,
    LabelledTextEncoder,
    MultiLabelEncoder,
    NumericLabelEncoder,
    TaggedWordsEncoder,
    Truncation,
)
from finetune.data.features import UNLABELED
from finetune.errors import DataError
from tests.data.encoding.word_pieces import WORDS, bert_tokenizer
from tests.refusals import refused

CLASSES = Classes(("bad", "good"))


@pytest.fixture
def bert():
    return bert_tokenizer()


def tokens(features):
    return " ".join(WORDS[token] for token in features.arrays["input_ids"])


def test_a_labelled_text_gets_the_special_tokens_of_the_tokenizer(bert):
    encoder = pickle.loads(pickle.dumps(LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES))))
    one, two = encoder([{"text": "A playing b", "label": "good"}, {"text": "c", "label": "bad"}])
    assert tokens(one) == "[CLS] a play ##ing b [SEP]"
    assert list(one.arrays) == ["input_ids", "token_type_ids", "labels"]  # the first array is the sample's length
    assert (one.arrays["labels"].tolist(), two.arrays["labels"].tolist()) == ([1], [0])
    assert (one.num_targets, one.length, one.cut_tokens) == (1, 6, 0)


def test_text_pairs_have_token_types_and_may_be_mixed_with_single_texts(bert):
    rows = [{"text": "a", "text_pair": "b c", "label": "good"}, {"text": "d", "label": "bad"}]
    pair, single = LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES))(rows)
    assert tokens(pair) == "[CLS] a [SEP] b c [SEP]"
    assert pair.arrays["token_type_ids"].tolist() == [0, 0, 0, 1, 1, 1]
    assert tokens(single) == "[CLS] d [SEP]"


@pytest.mark.parametrize(("side", "left"), [("end", "[CLS] a b [SEP]"), ("start", "[CLS] c d [SEP]")])
def test_a_truncated_text_keeps_its_special_tokens_and_counts_cut_tokens(bert, side, left):
    (cut,) = LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES), cut=Truncation(4, side))(
        [{"text": "a b c d", "label": "bad"}]
    )
    assert tokens(cut) == left
    assert cut.cut_tokens == 2
    assert bert.truncation_side == "right"
    assert bert.backend_tokenizer.truncation is None  # it is saved as it was loaded


def test_the_longer_of_two_texts_is_truncated(bert):
    row = {"text": "a b c d", "text_pair": "b", "label": "bad"}
    (cut,) = LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES), cut=Truncation(6, "end"))([row])
    assert tokens(cut) == "[CLS] a b [SEP] b [SEP]"


def test_a_length_without_room_is_refused(bert):
    with refused(DataError, "data.max_length: 3"):
        LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES), cut=Truncation(3, "end"))


def test_a_row_without_text_has_nothing_to_learn(bert):
    assert LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES))([{"text": "  ", "label": "bad"}]) == [None]


LABELS = [
    (ClassLabelEncoder(CLASSES), "good", [1]),
    (MultiLabelEncoder(CLASSES), ["good"], [0, 1]),
    (MultiLabelEncoder(CLASSES), [], [0, 0]),
    (MultiLabelEncoder(CLASSES), '["good", "bad"]', [1, 1]),
    (MultiLabelEncoder(CLASSES), ["good", "good"], [0, 1]),
    (MultiLabelEncoder(CLASSES), {"good": 1, "bad": 0}, [0, 1]),
    (MultiLabelEncoder(CLASSES), '{"good": true, "bad": "0"}', [0, 1]),
    (MultiLabelEncoder(CLASSES), [1, 0], [1, 0]),
    (MultiLabelEncoder(CLASSES), "[0, 1.0]", [0, 1]),
    (MultiLabelEncoder(Classes(("0", "1"))), [1], [0, 1]),
    (MultiLabelEncoder(Classes(("0", "1")), is_vector=True), [1, 0], [1, 0]),
    (MultiLabelEncoder(Classes(("0", "1")), is_vector=True), [], [0, 0]),
    (NumericLabelEncoder(2), {"a": 0.5, "b": 2}, [0.5, 2]),
    (NumericLabelEncoder(1), -1, [-1]),
    (NumericLabelEncoder(1), 0.5, [0.5]),
    (NumericLabelEncoder(1), "-2.5", [-2.5]),
    (NumericLabelEncoder(2), [1, 2.5], [1, 2.5]),
]


@pytest.mark.parametrize(("labels", "label", "numbers"), LABELS)
def test_labels_become_numbers(labels, label, numbers):
    assert labels(label).tolist() == numbers


NUMBERS = Classes(("0", "1"))
NONE = [
    *((encoder, None) for encoder in (ClassLabelEncoder(CLASSES), MultiLabelEncoder(CLASSES), NumericLabelEncoder(1))),
    *((ClassLabelEncoder(NUMBERS), label) for label in (-1, -100, -1.0, "-1", "-100")),
    (ClassLabelEncoder(CLASSES), -1),
    (MultiLabelEncoder(NUMBERS), [-1]),
    (MultiLabelEncoder(CLASSES), {"good": -1, "bad": -1}),
    (MultiLabelEncoder(CLASSES), {"good": None, "bad": None}),
]


@pytest.mark.parametrize(("labels", "label"), NONE)
def test_a_row_without_a_label_is_left_out_as_such(bert, labels, label):
    assert LabelledTextEncoder(bert, labels)([{"text": "a", "label": label}]) == [UNLABELED]


WRONG = [
    (ClassLabelEncoder(CLASSES), "-1"),
    (ClassLabelEncoder(NUMBERS), -2),
    (MultiLabelEncoder(NUMBERS), [0, -1]),
    (MultiLabelEncoder(CLASSES), [1, 0, 1]),
    (MultiLabelEncoder(NUMBERS, is_vector=True), [1, 2]),
    (MultiLabelEncoder(CLASSES), {"good": 0.5, "bad": 0}),
    (MultiLabelEncoder(CLASSES), {"good": 1, "fine": 0}),
    (MultiLabelEncoder(CLASSES), "good|bad"),
    (ClassLabelEncoder(CLASSES), {"good": 1}),
    (ClassLabelEncoder(CLASSES), ["good"]),
    (ClassLabelEncoder(CLASSES), "fine"),
    (MultiLabelEncoder(CLASSES), "good"),
    (MultiLabelEncoder(CLASSES), ["fine"]),
    (NumericLabelEncoder(1), "three"),
    (NumericLabelEncoder(1), True),
    (NumericLabelEncoder(1), float("nan")),
    (NumericLabelEncoder(1), [1, 2]),
]


@pytest.mark.parametrize(("labels", "label"), WRONG)
def test_a_label_of_another_type_is_rejected_with_the_setting_to_write(bert, labels, label):
    (outcome,) = LabelledTextEncoder(bert, labels)([{"text": "a", "label": label}])
    with refused(DataError):
        raise outcome


def test_a_row_of_another_format_is_rejected_with_the_format_to_write(bert):
    (outcome,) = LabelledTextEncoder(bert, ClassLabelEncoder(CLASSES))([{"messages": []}])
    assert "Use `format: labelled`" in str(outcome)


TAGS = Classes(("O", "B-LOC", "I-LOC"))


@pytest.fixture
def encoder():
    return pickle.loads(pickle.dumps(TaggedWordsEncoder(bert_tokenizer(), TAGS)))


def shown(features, words):
    """Return each token, with its tag where it is a target: `a/O`."""
    arrays = features.arrays
    tokens = zip(arrays["input_ids"], arrays["is_target"], arrays["labels"], strict=True)
    return " ".join(f"{words[i]}/{TAGS.names[label]}" if is_target else words[i] for i, is_target, label in tokens)


def test_a_word_without_tokens_becomes_the_unknown_token(encoder):
    (sample,) = encoder([{"tokens": ["a", "\u200b", "b"], "tags": ["O", "B-LOC", "O"]}])
    assert shown(sample, WORDS) == "[CLS] a/O [UNK]/B-LOC b/O [SEP]"


@pytest.mark.parametrize("none", [-100, -1, None])
def test_a_word_without_a_tag_is_no_target(encoder, none):
    sample, unlabeled = encoder(
        [{"tokens": ["playing", "a", "b"], "tags": [none, "B-LOC", none]}, {"tokens": ["a"], "tags": [none]}]
    )
    assert shown(sample, WORDS) == "[CLS] play ##ing a/B-LOC b [SEP]"
    assert sample.num_targets == 1
    assert unlabeled is UNLABELED


def test_words_of_a_byte_level_tokenizer_stay_separate(tokenizer):
    (sample,) = TaggedWordsEncoder(tokenizer, TAGS)([{"tokens": ["Be", "brief"], "tags": ["O", "B-LOC"]}])
    assert tokenizer.decode(sample.arrays["input_ids"].tolist()) == "Be brief"
    assert sample.num_targets == 2


def test_a_word_without_tokens_is_rejected_if_there_is_no_unknown_token(tokenizer):
    (outcome,) = TaggedWordsEncoder(tokenizer, TAGS)([{"tokens": ["", "a"], "tags": ["O", "O"]}])
    assert "word 1 ('') produces no token" in str(outcome)


def test_rows_without_words_or_with_unknown_tags(encoder):
    empty, wrong, other = encoder([{"tokens": [], "tags": []}, {"tokens": ["a"], "tags": ["X"]}, {"text": "a"}])
    assert empty is None
    assert "no class `X`; the classes are `O`, `B-LOC`, `I-LOC`" in str(wrong)
    assert "Use `format: tagged`" in str(other)


def test_a_tokenizer_without_word_boundaries_is_rejected():
    class Slow:
        is_fast = False

    with refused(DataError):
        TaggedWordsEncoder(Slow(), TAGS)
