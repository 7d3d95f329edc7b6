"""A tokenizer.json may ask for anything of the text that it is given: what it does to a probe tells, within bounds."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from finetune.errors import ModelError
from finetune.model.loading.model_files import is_panic

MAX_INSERTED = 256
"""Characters that one rule of a tokenizer may put in the place of a match; known ones insert at most 30."""
MAX_GROWTH = 64
"""Times that the whole of a normalizer may lengthen a text; NFKC makes 18 characters of one."""
MAX_ADDED_TOKENS = 1_000
"""Special tokens around each text."""

_PROBE = "".join(map(chr, range(0x20, 0x7F))) + "\u00e9\u2581\ufdfa\n"


def check_tokenizer(loaded: Any, place: str) -> None:
    """Raise ModelError for a tokenizer (or a processor's) whose rules lengthen text without bound, or that panics."""
    tokenizer = getattr(loaded, "tokenizer", loaded)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or backend is None:
        return
    problem = None
    if backend.num_special_tokens_to_add(False) > MAX_ADDED_TOKENS:
        problem = f"its post-processor adds more than {MAX_ADDED_TOKENS:,} special tokens to each text"
    for part in ("normalizer", "pre_tokenizer"):
        if problem is None and getattr(backend, part) is not None:
            problem = _rule_problem(json.loads(getattr(backend, part).__getstate__()), part=part)
    if problem is None and backend.normalizer is not None:
        problem = _growth_problem(backend.normalizer)
    if problem is None:
        try:
            backend.encode(_PROBE)
        except BaseException as error:
            if not is_panic(error) and not isinstance(error, Exception):
                raise
            problem = f"it cannot encode plain text ({str(error)[:200]})"
    if problem is not None:
        raise ModelError(f"{place}: tokenizer.json is damaged: {problem}. Copy it again from its source.")


def _rules(state: Any) -> Iterator[dict[str, Any]]:
    if isinstance(state, dict):
        yield state
    for part in state.values() if isinstance(state, dict) else state if isinstance(state, list) else ():
        yield from _rules(part)


def _rule_problem(state: Any, *, part: str) -> str | None:
    for rule in _rules(state):
        if rule.get("type") == "Replace" and _matches_nothing(rule.get("pattern")):
            return f"a rule of its {part} matches the empty text"
        for key in ("content", "prepend", "replacement"):
            if isinstance(rule.get(key), str) and len(rule[key]) > MAX_INSERTED:
                return f"a rule of its {part} inserts {len(rule[key]):,} characters for each match"
    return None


def _matches_nothing(pattern: Any) -> bool:
    """Return whether the pattern matches the empty text, after which the offsets of tokens are wrong or panic."""
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        return pattern == {"String": ""}
    with suppress(re.error, RecursionError, OverflowError):  # it is of another dialect than Python's
        return re.fullmatch(pattern["Regex"], "") is not None
    return False


def _growth_problem(normalizer: Any) -> str | None:
    """Apply one rule after the other to a text with all their patterns, so that no step can take long."""
    steps = list(_flat(normalizer))
    rules = [rule for rule in _rules(json.loads(normalizer.__getstate__())) if isinstance(rule.get("pattern"), dict)]
    text = (_PROBE + "".join(str(rule["pattern"].get("String", "")) for rule in rules))[:10_000]
    allowed = MAX_GROWTH * len(text)
    for step in steps:
        try:
            text = step.normalize_str(text)
        except BaseException as error:
            if not is_panic(error) and not isinstance(error, Exception):
                raise
            return f"its normalizer fails on plain text ({str(error)[:200]})"
        if len(text) > allowed:
            return f"its normalizer makes texts more than {MAX_GROWTH} times as long"
    return None


def _flat(normalizer: Any) -> Iterator[Any]:
    if isinstance(normalizer, normalizers.Sequence):
        for index in range(len(normalizer)):
            yield from _flat(normalizer[index])
    else:
        yield normalizer
