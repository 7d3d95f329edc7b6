"""Encode texts with labels, words with tags, and images with labels; the classes of labels and their weights."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.encoding.text import TextRowsEncoder, Truncation, arrays_in, framed
from finetune.data.features import UNLABELED, Features, Outcome, Unlabeled, result_or_error
from finetune.data.formats.columns import NO_LABELS, quoted_list
from finetune.data.images import Mode, StoredImage, decode_image
from finetune.data.rows import Row, describe, parse_row_json, require_valid_unicode, shortened
from finetune.errors import DataError

_MAX_LISTED = 20


@dataclass(frozen=True)
class Classes:
    """The names of the classes in the order of the model's outputs."""

    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def index(self, label: Any) -> int:
        """Return the output index of a row's class; raises DataError naming it and the known ones."""
        name = label_name(label)
        index = self._indices.get(name)
        if index is None:
            more = len(self.names) - _MAX_LISTED
            listed = quoted_list(self.names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
            raise DataError(
                f"there is no class `{name}`; the classes are {listed}. Fix the label, or add the class to "
                "`task.classification.labels`."
            )
        return index

    def has_no_label(self, label: Any) -> bool:
        """Return whether the label means that there is none: null, or -1 or -100 unless it is a class.

        As text, as in a CSV file, the numbers mean that only if all classes are numbers.
        """
        if label is None:
            return True
        is_text = isinstance(label, str) and label in NO_LABELS and all(map(str.isdecimal, self.names))
        is_number = isinstance(label, int | float) and label in _NO_NUMBERS
        return (is_text or is_number) and label_name(label) not in self._indices

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


_NO_NUMBERS = tuple(map(int, NO_LABELS))


def label_name(label: Any) -> str:
    """Return the class name of a label: the text itself, or an integer or boolean as in JSON.

    >>> label_name("spam"), label_name(3), label_name(3.0), label_name(True)
    ('spam', '3', '3', 'true')

    Raises DataError for anything else, including blank text.
    """
    if isinstance(label, str) and label.strip():
        return require_valid_unicode(label)
    if isinstance(label, bool):
        return "true" if label else "false"
    if isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        return str(int(label))
    if isinstance(label, str):
        raise DataError("the label is empty. Write a class.")
    raise DataError(f"a label must be text or an integer, but is {describe(label)}.")


_MAX_DIGITS = 1_000


def sort_names(names: Iterable[str]) -> list[str]:
    """Return the class names sorted: numerically if all of them are integers, else as text.

    >>> sort_names(["10", "9"]), sort_names(["b", "10", "9"])
    (['9', '10'], ['10', '9', 'b'])
    """
    unsorted = list(names)
    are_numbers = all(name.removeprefix("-").isdecimal() and len(name) < _MAX_DIGITS for name in unsorted)
    return sorted(unsorted, key=int if are_numbers else str)


def balanced_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """Return a weight for each class, inversely proportional to its frequency; their mean over all samples is 1.

    A class that does not occur has weight 1.

    >>> balanced_weights([3, 1])
    (0.6666666666666666, 2.0)
    """
    num_present = sum(count > 0 for count in counts)
    return tuple(sum(counts) / (num_present * count) if count else 1.0 for count in counts)


def positive_weights(counts: Sequence[int], num_rows: int) -> tuple[float, ...]:
    """Return, for each class, the ratio of rows without it to rows with it, as torch recommends for `pos_weight`.

    A class that no row or every row has gets weight 1.

    >>> positive_weights([2, 5, 10, 0], 10)
    (4.0, 1.0, 1.0, 1.0)
    """
    return tuple((num_rows - count) / count if 0 < count < num_rows else 1.0 for count in counts)


LabelEncoder = Callable[[Any], np.ndarray | None]
"""Converts a row's label to an array of numbers, 1-D, or None if it means that there is none; raises DataError for any
other label. Must be picklable."""


@dataclass(frozen=True)
class ClassLabelEncoder:
    """Encodes a label that is the name of one class."""

    classes: Classes

    def __call__(self, label: Any) -> np.ndarray | None:
        """Return the index of the class, int64 [1]; None without a label."""
        if isinstance(label, list | dict):
            raise DataError(
                f"the label is {describe(label)}. Write one class, or `task.classification.kind: multi_label` (for "
                "numbers: `regression`)."
            )
        return None if self.classes.has_no_label(label) else np.array([self.classes.index(label)], np.int64)


@dataclass(frozen=True)
class MultiLabelEncoder:
    """Encodes a label that is a list of class names, possibly empty, or 0 or 1 for each class."""

    classes: Classes
    is_vector: bool = False  # whether lists are 0 or 1 for each class even where `0` or `1` is a class

    def __call__(self, label: Any) -> np.ndarray | None:
        """Return whether each class applies, float32 [classes]; None without a label."""
        value = read_label_list(label)
        if value is None or (isinstance(value, list) and len(value) == 1 and self.classes.has_no_label(value[0])):
            return None
        may_be_vector = self.is_vector or not {"0", "1"} & set(self.classes.names)
        if isinstance(value, list) and value and may_be_vector and (self.is_vector or are_bits(value)):
            if len(value) != len(self.classes):
                raise DataError(
                    f"the label has {len(value)} numbers, but there are {len(self.classes)} classes. Fix the label, or "
                    "`task.classification.labels`."
                )
            value = dict(zip(self.classes.names, value, strict=True))
        applies = np.zeros(len(self.classes), np.float32)
        indices = {name: self.classes.index(name) for name in value}
        applies[[indices[name] for name in present_classes(value)]] = 1.0
        return applies


@dataclass(frozen=True)
class NumericLabelEncoder:
    """Encodes a label that is a number, or a list of `num_numbers` numbers."""

    num_numbers: int

    def __call__(self, label: Any) -> np.ndarray | None:
        """Return the numbers, float64 [numbers]; None without a label."""
        if label is None:
            return None
        values = read_label_numbers(label)
        if len(values) != self.num_numbers:
            raise DataError(
                f"the label has {len(values)} number{'s' * (len(values) != 1)}, but the first row or "
                f"`task.classification.labels` has {self.num_numbers}. All rows need the same number of values."
            )
        return np.array(values, np.float64)


_LARGEST = 1e38
"""The largest number of a label: labels become float32."""


def read_label_list(label: Any) -> list[Any] | Mapping[str, Any] | None:
    """Return the class names in a multi-label, or 0 or 1 by class name; None if it is null or has none.

    A string is parsed as JSON.
    """
    value = label
    if isinstance(label, str):
        try:
            value = parse_row_json(label)
        except (ValueError, DataError):
            value = label
    if isinstance(value, Mapping):
        return None if value and all(bit is None or str(bit) in NO_LABELS for bit in value.values()) else value
    if value is not None and not isinstance(value, list):
        raise DataError(
            f"the label must be a list of classes ([] for none), but is {describe(label)}. Write "
            '["a", "b"], or `task.classification.kind: single_label`. Texts such as `a,b` become lists by `template: '
            "{label: \"{{ (label.split(',') if label else []) | tojson }}\"}`, where `label` is your column's name."
        )
    return value


def are_bits(values: Iterable[Any]) -> bool:
    """Return whether all values are 0 or 1, as numbers, booleans or text."""
    return all(str(value).lower() in _BITS for value in values)


_BITS = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def present_classes(value: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """Return the classes in a list, or those with 1 in an object; raises DataError for another value in it."""
    if not isinstance(value, Mapping):
        return list(value)
    for name, bit in value.items():
        if str(bit).lower() not in _BITS:
            raise DataError(f"the label of class `{name}` must be 0 or 1, but is {describe(bit)}.")
    return [name for name, bit in value.items() if _BITS[str(bit).lower()]]


def read_label_numbers(label: Any) -> Sequence[float]:
    """Return the numbers of a label: a number, a list of numbers, or a string that holds one, as in a CSV file."""
    values = list(label.values()) if isinstance(label, dict) else label if isinstance(label, list) else [label]
    numbers = [_number(value) for value in values]
    if not numbers:
        raise DataError("the label is an empty list. Write a number.")
    return numbers


def _number(value: Any) -> float:
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        actual = f"`{shortened(value)}`" if isinstance(value, str) else describe(value)
        raise DataError(
            f"the label must be a finite number of at most {_LARGEST:g}, but is {actual}. Fix it, or write another "
            "`kind`."
        )
    return number


LABELS = "labels"
"""The array that holds the label."""


class LabelledTextEncoder(TextRowsEncoder):
    """Encodes texts with the tokenizer's special tokens, and reads their labels.

    Samples hold `input_ids` (uint32), `token_type_ids` (uint8) if the tokenizer returns them, and `labels`. With a
    `cut`, texts that are too long are truncated here; they keep their special tokens, and the number of removed tokens
    is recorded. Raises DataError if `max_length` leaves no room between the special tokens.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        labels: LabelEncoder,
        *,
        cut: Truncation | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._labels = labels
        self._cut = cut
        if cut is not None:
            cut.require_room(tokenizer, pair=True)

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None for a row without text, or its error."""
        labels = [result_or_error(self._label, row) for row in rows]
        outcomes: list[Outcome] = [None if isinstance(label, np.ndarray) else label for label in labels]
        for names in (("text",), ("text", "text_pair")):
            good = [
                (index, label)
                for index, (row, label) in enumerate(zip(rows, labels, strict=True))
                if ("text_pair" in row) is (len(names) == 2) and isinstance(label, np.ndarray)
            ]
            texts = [tuple(rows[index][name] for name in names) for index, _ in good]
            for (index, label), (arrays, lost) in zip(good, framed(self._tokenizer, texts, self._cut), strict=True):
                outcomes[index] = Features({**arrays, LABELS: label}, cut_tokens=lost)
        return outcomes

    def _label(self, row: Row) -> np.ndarray | Unlabeled | None:
        """Return the row's label; None if the row has no text."""
        label = self._labels(label_of(row))
        if label is None:
            return UNLABELED
        texts = [require_valid_unicode(row[name]) for name in ("text", "text_pair") if name in row]
        return label if any(text.strip() for text in texts) else None


def label_of(row: Row) -> Any:
    """Return the label of a row; raises DataError for a row of another format."""
    if "label" not in row or "text" not in row:
        raise DataError("this task trains on labelled texts. Use `format: labelled`: columns `text` and `label`.")
    return row["label"]


IGNORED_TAG = -1
"""The index of the tag of a word without one."""

Encoded = tuple[np.ndarray, Mapping[str, np.ndarray]]
"""The word index of each token, -1 for special tokens, and the model inputs."""


class TaggedWordsEncoder(TextRowsEncoder):
    """Encodes sentences that are split into words, with the tokenizer's special tokens.

    Samples hold `input_ids` (uint32), `token_type_ids` (uint8) if the tokenizer returns them, `is_target` (bool) and
    `labels` (int32), all of the same length: the first token of a word with a tag is a target, its label the index of
    the tag. A word that produces no token is replaced by the unknown token, so that every word counts. Words after the
    first get a leading space if the tokenizer would otherwise join them (GPT-2, RoBERTa). Raises DataError for a
    tokenizer that does not map tokens to words.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, classes: Classes, *, allow_special_tokens: bool = False
    ) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer ({type(tokenizer).__name__}) is written in Python and does not map tokens to "
                "words. Name a model or `model.tokenizer` with a `tokenizer.json`."
            )
        super().__init__(tokenizer, allow_special_tokens=allow_special_tokens)
        self._classes = classes
        probe = tokenizer(["ab", "cd"], is_split_into_words=True, add_special_tokens=False)["input_ids"]
        self._before = " " if "abcd" in tokenizer.decode(probe).lower() else ""

    def _texts_of(self, row: Row) -> Iterable[str]:
        words: Iterable[str] = row.get("tokens", ())
        return words

    def _encoded(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the features of each row; None for a row without words, or its error."""
        tags = [result_or_error(self._tags, row) for row in rows]
        good = [index for index, ids in enumerate(tags) if isinstance(ids, np.ndarray) and (ids != IGNORED_TAG).any()]
        outcomes: list[Outcome] = [
            ids if isinstance(ids, DataError) else UNLABELED if len(ids) else None for ids in tags
        ]
        for index, encoded in zip(good, self._tokenized([rows[index]["tokens"] for index in good]), strict=True):
            outcomes[index] = result_or_error(self._features, rows[index]["tokens"], tags[index], encoded)
        return outcomes

    def _tags(self, row: Row) -> np.ndarray:
        """Return the index of each word's tag; IGNORED_TAG for a word without one."""
        tags = tags_of(row)
        for word in row["tokens"]:
            require_valid_unicode(word)
        has_none = self._classes.has_no_label
        return np.array([IGNORED_TAG if has_none(tag) else self._classes.index(tag) for tag in tags], np.int32)

    def _features(self, words: Sequence[str], tags: np.ndarray, encoded: Encoded) -> Features:
        lost = set(range(len(words))) - set(encoded[0].tolist())
        if lost:
            unknown = self._tokenizer.unk_token
            if unknown is None or self._tokenizer.unk_token_id in (None, self._tokenizer.eos_token_id):
                word = min(lost)
                raise DataError(
                    f"word {word + 1} ({words[word]!r}) produces no token, and the tokenizer has no unknown token. "
                    "Remove it and its tag."
                )
            (encoded,) = self._tokenized([[unknown if index in lost else word for index, word in enumerate(words)]])
        word_of, arrays = encoded
        is_target = (word_of >= 0) & (word_of != np.append(-1, word_of[:-1])) & (tags[word_of] != IGNORED_TAG)
        labels = np.where(is_target, tags[word_of], 0).astype(np.int32)
        return Features({**arrays, "is_target": is_target, LABELS: labels})

    def _tokenized(self, sentences: Sequence[Sequence[str]]) -> list[Encoded]:
        if not sentences:
            return []
        spaced = [[words[0], *(f"{self._before}{word}" for word in words[1:])] for words in sentences]
        encoded = self._tokenizer(spaced, is_split_into_words=True, verbose=False)
        numbers = ([-1 if word is None else word for word in encoded.word_ids(n)] for n in range(len(sentences)))
        return [
            (np.array(words_of, np.int64), arrays) for words_of, arrays in zip(numbers, arrays_in(encoded), strict=True)
        ]


def tags_of(row: Row) -> Sequence[Any]:
    """Return the tags of a row; raises DataError for a row of another format."""
    if "tags" not in row:
        raise DataError("this task trains on tagged words. Use `format: tagged`: columns `tokens` and `tags`.")
    return list(row["tags"])


LABEL, IMAGE, NAME = "label", "image", "name"
"""The arrays of a sample: the index of its class (int64, [1]), its encoded bytes, and the file's name in UTF-8."""

_NAME_PARTS = 2
"""The number of path components in a name: the folder is usually the class."""


@dataclass(frozen=True)
class LabelledImageEncoder:
    """Encodes rows of `image` and `label`. Cheap to pickle."""

    classes: Classes
    mode: Mode

    def __call__(self, rows: Sequence[Row]) -> Sequence[Outcome]:
        """Return label, encoded bytes and name of each row, or its error."""
        return [result_or_error(self._encoded, row) for row in rows]

    def _encoded(self, row: Row) -> Features | Unlabeled:
        if self.classes.has_no_label(row["label"]):
            return UNLABELED
        image: StoredImage = row["image"]
        content = image.read()
        try:
            decode_image(content, mode=self.mode)
        except DataError as error:
            raise DataError(f"the image {image.name} cannot be used: {error}.") from error
        arrays: dict[str, np.ndarray] = {
            LABEL: np.array([self.classes.index(row["label"])], np.int64),
            IMAGE: np.frombuffer(content, np.uint8),
            NAME: np.frombuffer("/".join(PurePath(image.name).parts[-_NAME_PARTS:]).encode(), np.uint8),
        }
        return Features(arrays)


def image_name(features: Features) -> str:
    """Return the name of the sample's image."""
    return bytes(features.arrays[NAME]).decode("utf-8", "replace")
