"""Control tokens, such as delimiters of turns: their names in a row's content are encoded as plain text."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_python import Trie

from finetune.data.encoding.tokenizer import TextTokenizer
from finetune.errors import DataError


def _renamed_backend(parts: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    for token in parts["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["normalized"] = False  # match the new name verbatim
    parts["truncation"] = parts["padding"] = None
    model = parts["model"]
    try:
        renamed = dict(model)
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            renamed["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        elif isinstance(vocabulary, list):
            renamed["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if isinstance(model.get("unk_token"), str):
            renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        return Tokenizer.from_str(json.dumps({**parts, "model": renamed}))
    except Exception:  # `tokenizers` raises plain Exception: a token that is the result of merges cannot be renamed
        pass
    try:
        return Tokenizer.from_str(json.dumps(parts))
    except Exception as error:
        raise DataError(
            f"this tokenizer cannot encode the names of control tokens as plain text ({error}). Remove them "
            "from the row, or set data.allow_special_tokens: true."
        ) from error


_PLACEHOLDERS, _NEW_NAMES = 0x100000, 0x108000
"""The first private-use characters of the placeholders for letters of names, and of the new names."""

_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
_REMEDY = "Remove them from the row, or set data.allow_special_tokens: true, which encodes them as control tokens."


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the `turn_marks` that a chat template writes.

    With `allowed`, names in content keep their meaning and no text is searched.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, turn_marks: Iterable[str] = (), allowed: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        names = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
        names |= {*map(str, tokenizer.all_special_tokens), *turn_marks}
        # names that occur in ordinary text cannot be distinguished from control tokens
        self.names = (
            frozenset()
            if allowed
            else frozenset(name for name in names if len(name) > 1 and not name.isspace() and not name.isalnum())
        )
        letters = {
            letter: chr(_PLACEHOLDERS + number) for number, letter in enumerate(sorted(set("".join(self.names))))
        }
        self._to_placeholders = str.maketrans(letters)
        self._from_placeholders = str.maketrans({placeholder: letter for letter, placeholder in letters.items()})
        self._new_names = {name: chr(_NEW_NAMES + number) * len(name) for number, name in enumerate(sorted(self.names))}
        unknown = tokenizer.unk_token_id  # usually a token of its own, which `check` ignores
        if tokenizer.unk_token is None or unknown in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            unknown = None
        self._unknown = None if unknown is None else self._new_names.get(str(tokenizer.unk_token))
        self._ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(self.names))) - {unknown, None}
        self._pattern = _one_of(self.names) if self.names else None
        self._normalized_pattern: re.Pattern[str] | None = None  # of the names that are matched in normalized text
        if getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None) is not None:
            added = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.normalized}
            normalized = {_normalized(tokenizer, name) for name in self.names & added}
            self._normalized_pattern = _one_of(normalized) if any(normalized) else None

    def held_by(self, value: Any) -> bool:
        """Return whether the text, or any text in the turns or schemas, contains a control token's name.

        Texts are searched concatenated: a template may join two texts of a row.
        """
        if self._pattern is None:
            return False
        text = value if isinstance(value, str) else "".join(texts_in(value))
        if self._pattern.search(text) is not None:
            return True
        pattern = self._normalized_pattern
        return pattern is not None and pattern.search(_normalized(self._tokenizer, text)) is not None

    def with_placeholders(self, value: Any) -> Any:
        """Return the text, or turns or schemas, with placeholders for control tokens' names and for parts of names.

        Raises DataError for a row that contains placeholders itself.
        """
        if isinstance(value, Mapping):
            return {self.with_placeholders(name): self.with_placeholders(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.with_placeholders(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if _PRIVATE.search(value):
            raise DataError(f"contains private-use characters as well as names of control tokens. {_REMEDY}")
        assert self._pattern is not None
        text = self._pattern.sub(lambda match: match.group().translate(self._to_placeholders), value)
        partial = self._beginnings.search(text, max(0, len(text) - max(map(len, self.names))))
        return text if partial is None else text[: partial.start()] + partial.group().translate(self._to_placeholders)

    def restored(self, text: str) -> str:
        """Return the text with the placeholders replaced by the names."""
        return text.translate(self._from_placeholders)

    def renamed(self, text: str) -> str:
        """Return the text for the renamed tokenizer: new names for control tokens, original names for placeholders."""
        if self._pattern is not None:
            text = self._added.sub(lambda match: self._new_names.get(match.group(), match.group()), text)
        return self.restored(text)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer that encodes the names as plain text; raises DataError if it cannot be built."""
        renamed = copy.copy(self._tokenizer)
        renamed._special_tokens_map = {
            key: None if value is None else self._new_names.get(str(value), value)
            for key, value in self._tokenizer._special_tokens_map.items()
        }
        renamed._extra_special_tokens = [
            self._new_names.get(str(token), token) for token in self._tokenizer._extra_special_tokens
        ]
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            renamed._tokenizer = _renamed_backend(json.loads(backend.to_str()), self._new_names)
        else:
            tokens = {index: copy.copy(token) for index, token in self._tokenizer._added_tokens_decoder.items()}
            for token in tokens.values():
                token.content = self._new_names.get(token.content, token.content)
            renamed._added_tokens_decoder = tokens
            renamed._added_tokens_encoder = {token.content: index for index, token in tokens.items()}
            renamed.tokens_trie = Trie(list(renamed._added_tokens_encoder))
        return renamed

    @cached_property
    def tokens(self) -> TextTokenizer:
        """Return a `TextTokenizer` of the renamed tokenizer."""
        return TextTokenizer(self.tokenizer)

    def check(self, ids: Iterable[int], text: str = "") -> None:
        """Raise DataError if the ids have more or fewer control tokens than the renamed text contains."""
        num_encoded = sum(token in self._ids for token in ids)
        num_expected = sum(name != self._unknown for name in self._new.findall(text))
        if num_encoded != num_expected:
            raise DataError(
                "contains the name of a control token, which this tokenizer cannot encode as plain text. " + _REMEDY
            )

    def check_plain(self, texts: Iterable[str]) -> None:
        """Raise DataError if a text is still encoded as a control token."""
        for text in texts:
            if self.held_by(text):
                self.check(self.tokens.ids(text))

    @cached_property
    def _new(self) -> re.Pattern[str]:
        return _one_of(self._new_names.values())

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Return a pattern that matches added tokens as the tokenizer does: leftmost, longest first."""
        added = {str(token.content) for token in self._tokenizer.added_tokens_decoder.values()}
        return _one_of({*added, *self.names})

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        """Return a pattern that matches a prefix of a name at the end of a text."""
        return re.compile(f"(?:{_one_of({name[:n] for name in self.names for n in range(1, len(name))}).pattern})\\Z")


def texts_in(value: Any) -> list[str]:
    """Return the texts of turns or schemas in order, including the keys of objects other than turns."""
    texts: list[str] = []
    if isinstance(value, str):
        texts.append(str(value))
    elif type(value) is dict or isinstance(value, Mapping):  # the first check is fast
        if "role" in value and "content" in value:
            for name, inner in value.items():
                if name != "role":
                    texts += texts_in(inner)
        elif value.get("type") == "text" and type(value.get("text")) is str:
            texts.append(value["text"])
        else:
            for name, inner in value.items():
                texts.append(str(name))
                texts += texts_in(inner)
    elif type(value) is list or (isinstance(value, Sequence) and not isinstance(value, bytes)):
        for inner in value:
            texts += texts_in(inner)
    return texts


def _normalized(tokenizer: Any, text: str) -> str:
    return str(tokenizer.backend_tokenizer.normalizer.normalize_str(text))


def _one_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))
