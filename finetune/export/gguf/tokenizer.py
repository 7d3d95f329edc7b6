"""The tokenizer of a GGUF file: byte-level BPE, or BPE with the pieces of SentencePiece."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from finetune.errors import ModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: Mapping[tuple[str, bool], str] = {
    ("", False): "gpt-2",
    ("digits", False): "smollm",
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "dbrx",
    (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), False): "qwen2",
}
"""llama.cpp's name of each pre-tokenizer: its regular expression, and whether whole words skip the merges."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_LOWEST_SCORE = -1e6


@dataclass(frozen=True)
class GGUFTokenizer:
    """The tokens in order, and the metadata; of a SentencePiece model scores instead of merges."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    ids: Mapping[str, int]  # of special tokens by key
    flags: Mapping[str, bool]


def convert_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, stop_ids: Collection[int], vocabulary_size: int
) -> GGUFTokenizer:
    """Return the tokenizer for that number of embeddings; raises ModelError for one that llama.cpp lacks."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = content.get("model", {})
    if model.get("type") != "BPE":
        raise _unknown(f"a tokenizer of the type {model.get('type', type(tokenizer).__name__)}")
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id = {number: text for text, number in model["vocab"].items()} | {n: added[n]["content"] for n in added}
    tokens = tuple(by_id.get(number, f"[PAD{number}]") for number in range(vocabulary_size))
    is_spm = bool(model.get("byte_fallback"))

    def type_of(number: int) -> int:
        if number not in by_id:
            return UNUSED
        if is_spm and by_id[number] == model.get("unk_token"):
            return UNKNOWN
        if number in added:
            return CONTROL if added[number]["special"] else USER_DEFINED
        is_byte = is_spm and len(by_id[number]) == 6 and by_id[number].startswith("<0x")
        return BYTE if is_byte else NORMAL

    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    flags = {"add_bos_token": begins, "add_eos_token": False}
    scores: tuple[float, ...] = ()
    if is_spm:
        scores = _scores(tokens, merges)
        normalizer, steps = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
        parts = [*normalizer.get("normalizers", [normalizer]), *steps.get("pretokenizers", [steps])]
        flags["add_space_prefix"] = any(
            part.get("type") == "Prepend" or part.get("prepend_scheme") in ("first", "always") for part in parts
        )
    return GGUFTokenizer(
        model="llama" if is_spm else "gpt2",
        pre="default" if is_spm else _pre_tokenizer(content),
        tokens=tokens,
        types=tuple(map(type_of, range(vocabulary_size))),
        merges=() if is_spm else tuple(merges),
        scores=scores,
        ids=_special_ids(tokenizer, stop_ids),
        flags=flags,
    )


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    steps = content.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", [steps])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"]
    patterns += ["digits" for part in parts if part.get("type") == "Digits" and part["individual_digits"]]
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    is_whole = len(byte_level) == 1 and len(patterns) + 1 == len(parts) and not byte_level[0]["add_prefix_space"]
    pattern = "".join(patterns)
    has_own_regex = pattern in ("", "digits")
    name = _PRE_TOKENIZERS.get((pattern, bool(content["model"].get("ignore_merges"))))
    if name is None or not is_whole or byte_level[0]["use_regex"] != has_own_regex:
        raise _unknown(f"this pre-tokenizer: {json.dumps(steps)[:300]}")
    return name


def _scores(tokens: tuple[str, ...], merges: list[str]) -> tuple[float, ...]:
    """Return a score for each piece, the higher the earlier it is merged.

    llama.cpp merges any two neighbors whose text is a piece; raises ModelError if the tokenizer merges only some.
    """
    pairs = {tuple(merge.split(" ")): rank for rank, merge in reversed(list(enumerate(merges)))}
    pieces = set(tokens)
    rank_of: dict[str, int] = {}
    for (left, right), rank in pairs.items():
        rank_of[left + right] = min(rank, rank_of.get(left + right, rank))
    for piece in rank_of:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        missing = next((split for split in splits if pieces.issuperset(split) and split not in pairs), None)
        if missing is not None:
            raise _unknown(f"a tokenizer with pieces but without all of their merges ({' + '.join(missing)})")
    return tuple(-float(rank_of[token]) if token in rank_of else _LOWEST_SCORE for token in tokens)


def _special_ids(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> dict[str, int]:
    """Return the ids of special tokens by key; llama.cpp ends answers at `eos`, `eot` and `eom`."""
    stops = sorted(stop_ids, key=lambda token: (token != tokenizer.eos_token_id, token))
    if len(stops) > 3:
        raise _unknown(f"{len(stops)} tokens that end an answer ({stops}); it has keys for three")
    ids = dict(zip(("eos", "eot", "eom"), stops, strict=False))
    for key in ("bos", "unk", "pad"):
        number = getattr(tokenizer, f"{key}_token_id")
        ids |= {} if number is None else {"unknown" if key == "unk" else "padding" if key == "pad" else key: number}
    return ids


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"GGUF: llama.cpp has no equivalent of {what}. Its own converter (convert_hf_to_gguf.py) refuses it, too, or "
        "guesses: compare the tokens with `finetune verify serving` if you use it."
    )
