"""Control tokens: what ends and begins turns. Their names in a row's content are text, and are encoded as text."""

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


def renamed_tokenizer(tokenizer: PreTrainedTokenizerBase, names: Mapping[str, str]) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer whose tokens with these names have the new ones; ids and all else are the same.

    Raises DataError for a tokenizer that cannot be changed so.
    """
    made = copy.copy(tokenizer)
    made._special_tokens_map = {key: _renamed(value, names) for key, value in tokenizer._special_tokens_map.items()}
    made._extra_special_tokens = [_renamed(each, names) for each in tokenizer._extra_special_tokens]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        made._tokenizer = _renamed_backend(json.loads(backend.to_str()), names)
    else:
        _rename_in_python(made, names)
    return made


def _renamed(token: Any, names: Mapping[str, str]) -> Any:
    return None if token is None else names.get(str(token), token)


def _renamed_backend(parts: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    for token in parts["added_tokens"]:
        if token["content"] in names:
            token["content"] = names[token["content"]]
            token["normalized"] = False  # the new name is looked for as it is written
    parts["truncation"] = parts["padding"] = None
    model = parts["model"]
    try:
        return Tokenizer.from_str(json.dumps({**parts, "model": _renamed_model(model, names)}))
    except Exception:  # `tokenizers` raises plain Exception: a name that merges lead to cannot be another
        pass
    try:
        return Tokenizer.from_str(json.dumps(parts))
    except Exception as error:
        raise DataError(
            f"the names of control tokens cannot be written as plain text by this tokenizer ({error}). Remove them "
            "from the row, or set data.allow_special_tokens: true."
        ) from error


def _renamed_model(model: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the model with the names in its vocabulary, so that it makes no such token of plain text either."""
    renamed = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        renamed["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        renamed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return renamed


def _rename_in_python(made: Any, names: Mapping[str, str]) -> None:
    known = {number: copy.copy(token) for number, token in made._added_tokens_decoder.items()}
    for token in known.values():
        token.content = names.get(token.content, token.content)
    made._added_tokens_decoder = known
    made._added_tokens_encoder = {token.content: number for number, token in known.items()}
    made.tokens_trie = Trie(list(made._added_tokens_encoder))


_STAND_INS, _NEW_NAMES = 0x100000, 0x108000
"""The first of the private-use characters that stand for those of names, and of those that new names are made of."""

_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
_REMEDY = "Remove them from the row, or set data.allow_special_tokens: true, which encodes them as control tokens."


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the `turn_marks` that a chat template writes.

    With `allowed`, names in content keep their meaning and nothing is looked for.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, turn_marks: Iterable[str] = (), allowed: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        known = {str(each.content) for each in tokenizer.added_tokens_decoder.values() if each.special}
        known |= {*map(str, tokenizer.all_special_tokens), *turn_marks}
        # what a text is made of in any case cannot be told from a control token
        self.names = frozenset() if allowed else frozenset(name for name in known if _is_a_mark(name))
        letters = {letter: chr(_STAND_INS + number) for number, letter in enumerate(sorted(set("".join(self.names))))}
        self._to_stand_ins = str.maketrans(letters)
        self._from_stand_ins = str.maketrans({stand_in: letter for letter, stand_in in letters.items()})
        self._pattern = _one_of(self.names) if self.names else None
        self._normalized_pattern = self._pattern_of_normalized()

    def held_by(self, value: Any) -> bool:
        """Tell whether the text, or the turns or schemas with all texts in them, hold a control token's name.

        Texts are looked at end to end: a template may join what a row has cut in two.
        """
        if self._pattern is None:
            return False
        text = value if isinstance(value, str) else "".join(texts_in(value))
        if self._pattern.search(text) is not None:
            return True
        pattern = self._normalized_pattern
        return pattern is not None and pattern.search(_normalized(self._tokenizer, text)) is not None

    def with_placeholders(self, value: Any) -> Any:
        """Return the text, or turns or schemas, with a stand-in for every control token's name and for a part of one.

        Raises DataError for a row that holds stand-ins itself.
        """
        if isinstance(value, str):
            return self._stood_in(value)
        if isinstance(value, Mapping):
            return {self.with_placeholders(name): self.with_placeholders(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.with_placeholders(inner) for inner in value]
        return value

    def restored(self, text: str) -> str:
        """Return the text with the names in place of the stand-ins."""
        return text.translate(self._from_stand_ins)

    def renamed(self, text: str) -> str:
        """Return the text for the renamed tokenizer: control tokens under their new names, stand-ins as the names."""
        if self._pattern is not None:
            text = self._added.sub(lambda found: self._new_names.get(found.group(), found.group()), text)
        return self.restored(text)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer to which the names are plain text; raises DataError where there can be none."""
        return renamed_tokenizer(self._tokenizer, self._new_names)

    @cached_property
    def tokens(self) -> TextTokenizer:
        """Return what encodes with that tokenizer."""
        return TextTokenizer(self.tokenizer)

    def check(self, ids: Iterable[int], text: str = "") -> None:
        """Raise DataError where the renamed text has become other control tokens than it has new names of."""
        found = sum(token in self._ids for token in ids)
        written = sum(name != self._unknown for name in self._new.findall(text))
        if found != written:
            raise DataError(
                "holds the name of a control token, which this tokenizer cannot write as plain text. " + _REMEDY
            )

    def check_plain(self, texts: Iterable[str]) -> None:
        """Raise DataError where a text becomes a control token all the same."""
        for text in texts:
            if self.held_by(text):
                self.check(self.tokens.ids(text))

    def _stood_in(self, text: str) -> str:
        if _PRIVATE.search(text):
            raise DataError(f"holds private-use characters beside names of control tokens. {_REMEDY}")
        assert self._pattern is not None
        text = self._pattern.sub(lambda found: found.group().translate(self._to_stand_ins), text)
        cut = self._beginnings.search(text, max(0, len(text) - max(map(len, self.names))))
        return text if cut is None else text[: cut.start()] + cut.group().translate(self._to_stand_ins)

    def _pattern_of_normalized(self) -> re.Pattern[str] | None:
        """Return what finds names that the tokenizer looks for in normalized text; None where it has no such names."""
        if getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None) is None:
            return None
        added = {str(each.content) for each in self._tokenizer.added_tokens_decoder.values() if each.normalized}
        names = {_normalized(self._tokenizer, name) for name in self.names & added}
        return _one_of(names) if any(names) else None

    @cached_property
    def _new_names(self) -> Mapping[str, str]:
        return {name: chr(_NEW_NAMES + number) * len(name) for number, name in enumerate(sorted(self.names))}

    @cached_property
    def _new(self) -> re.Pattern[str]:
        return _one_of(self._new_names.values())

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Return what finds added tokens as the tokenizer does: the first, and of several the longest."""
        added = {str(each.content) for each in self._tokenizer.added_tokens_decoder.values()}
        return _one_of({*added, *self.names})

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        """Return what finds the beginning of a name at the end of a text."""
        return re.compile(f"(?:{_one_of({name[:n] for name in self.names for n in range(1, len(name))}).pattern})\\Z")

    @cached_property
    def _unknown(self) -> str | None:
        """Return the new name of the token for unknown text: it says nothing of a name."""
        return self._new_names.get(str(self._tokenizer.unk_token)) if self._is_unknown_alone else None

    @property
    def _is_unknown_alone(self) -> bool:
        others = (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id)
        return self._tokenizer.unk_token is not None and self._tokenizer.unk_token_id not in others

    @cached_property
    def _ids(self) -> frozenset[int]:
        ids = self._tokenizer.convert_tokens_to_ids(sorted(self.names))
        unknown = {self._tokenizer.unk_token_id} if self._is_unknown_alone else set()
        return frozenset(ids) - unknown - {None}


def texts_in(value: Any) -> list[str]:
    """Return the texts of turns or of schemas in their order, and names of parts that are not a turn's own."""
    found: list[str] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[str]) -> None:
    kind = type(value)
    if kind is str:
        found.append(value)
    elif kind is dict:
        if "role" in value and "content" in value:
            for name, inner in value.items():
                if name != "role":
                    _gather(inner, found)
        elif value.get("type") == "text" and type(value.get("text")) is str:
            found.append(value["text"])
        else:
            for name, inner in value.items():
                found.append(str(name))
                if type(inner) is str:
                    found.append(inner)
                else:
                    _gather(inner, found)
    elif kind is list or kind is tuple:
        for inner in value:
            _gather(inner, found)
    elif isinstance(value, Mapping):
        _gather(dict(value), found)
    elif isinstance(value, str | Sequence) and not isinstance(value, bytes):
        _gather(str(value) if isinstance(value, str) else list(value), found)


def _normalized(tokenizer: Any, text: str) -> str:
    return str(tokenizer.backend_tokenizer.normalizer.normalize_str(text))


def _is_a_mark(name: str) -> bool:
    return len(name) > 1 and not name.isspace() and not name.isalnum()


def _one_of(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(name) for name in sorted(names, key=lambda name: (-len(name), name))))
