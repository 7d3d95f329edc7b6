"""A tokenizer that knows its control tokens by other names, so that what they were called is plain text to it."""

import copy
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.tokenization_python import Trie

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
