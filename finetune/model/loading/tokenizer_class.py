"""The tokenizer that AutoTokenizer loads from the exported folder, which may depend on the model type.

For some model types (`qwen2`, `qwen3_5`) transformers ignores tokenizer_config.json and builds a class with its own
pre-tokenizer and normalizer, which reads only vocabulary and merges from tokenizer.json.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import ModelError
from finetune.model.loading.pretrained import load_auto_class, without_warnings

# fmt: off
HOSTILE_TEXTS = (
    "", " ", "  ", "   \t ", "\n", "\n\n\n", "\r\n", "\t\tx", "a b", " a", "a ", "a  b", "a\n\nb", " \n a", "0",
    "7 8", "123456789", "1,234.56", "2026-11-23T00:13", "3.14159e-10", "0x7f", "x1y22z333", "\u0661\u0662\u0663",
    "\u00bd \u2153", "don't", "I'LL we'Ve", "'s", "HELLO World hElLo", "snake_case camelCase", "e-mail@x.org",
    "https://a.b/c?d=e#f", "na\u00efve caf\u00e9", "cafe\u0301", "\ufb01ne \ufb03", "Stra\u00dfe \u1e9e",
    "\u0130stanbul \u0131", "\u4f60\u597d\uff0c\u4e16\u754c", "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\ud55c\uad6d\uc5b4", "\u05e2\u05d1\u05e8\u05d9\u05ea", "\u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f44d\U0001f3fd", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f1eb\U0001f1f7",
    "\u200b\u200d\ufeff", "\u00a0x\u2003y", "a\u0000b", "\u202eabc", "\u00bd\u338f\u2460", "\U00012000",
    "def f(x):\n    return x ** 2  # y\n", "\n\n\n  if (a!=b){c+=1;}", "...!?--==>>", "((([[[{{{", "-----",
    "\\n\\t", "<|endoftext|>", "<|im_start|>user", "<s></s>", "[CLS] [SEP] [MASK]", "<|im_end|>\n", "<pad><unk>",
    "<0x0A>", "x" * 300, "ab " * 100, "The quick brown fox jumps over the lazy dog.",
    "\u00a1\u00bf\u00ab\u00bb\u201e\u201c\u201d\u2018\u2019\u2026\u2014\u2013",
)
# fmt: on
"""Texts on which pre-tokenizers, normalizers and tables of special tokens differ."""

_PLAIN = "The quick brown fox jumps over the lazy dog."


def as_loaded_for(
    tokenizer: PreTrainedTokenizerBase, *, model_type: str, trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, str | None]:
    """Return the tokenizer that AutoTokenizer loads for this model type, and a text that it encodes differently.

    If it encodes all texts identically, the given tokenizer and None are returned. Raises ModelError if the loaded one
    cannot use this vocabulary, so that a plain text would not survive encoding and decoding.
    """
    with TemporaryDirectory() as name, without_warnings():
        folder = Path(name)
        tokenizer.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
        loaded = load_auto_class(AutoTokenizer, folder, trust_remote_code=trust_remote_code, local_files_only=True)
    text = differing_text(tokenizer, loaded)
    if text is None:
        return tokenizer, None
    original, decoded = (
        str(one.decode(_ids(one, _PLAIN), skip_special_tokens=True)).strip() for one in (tokenizer, loaded)
    )
    if original != decoded:
        raise ModelError(
            f"model.tokenizer: for models of type `{model_type}`, transformers loads every tokenizer as "
            f"{type(loaded).__name__}, which cannot use this vocabulary: it decodes {_PLAIN!r} as {decoded!r}. Use a "
            f"byte-level BPE, such as `model.tokenizer.train`, or another model type."
        )
    return loaded, text


def differing_text(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str | None:
    """Return the first text that the two tokenizers encode differently; None if there is none."""
    return next((text for text in HOSTILE_TEXTS if _ids(one, text) != _ids(other, text)), None)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, verbose=False)["input_ids"])
