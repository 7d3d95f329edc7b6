"""Tokenizers for chat templates: byte-level, knowing the marks that a template writes; and the targets, as text."""

import importlib.util
import re
from pathlib import Path

import numpy as np

from tests.small_models import byte_tokenizer

MARK = re.compile(r"<[|\uff5c]?[^\s<>{}'\"=|\uff5c]+[|\uff5c]?>|\[/?[A-Z_]+\]")
"""What models write as one token, `<|im_end|>`, `<end_of_turn>`, `[INST]`; DeepSeek with a wide bar, U+FF5C."""

BEGIN, END = "<s>", "</s>"


def shipped_templates():
    """Return the chat templates that TRL ships, by name, found without importing it; empty where it is not there."""
    found = importlib.util.find_spec("trl")
    if found is None:
        return {}
    folder = Path(found.submodule_search_locations[0]) / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def tokenizer_for(template, **named):
    """Return a tokenizer with this template and single tokens for its marks, `<s>` and `</s>`."""
    marks = sorted(set(MARK.findall(template)) - {BEGIN, END})
    made = byte_tokenizer(special=[BEGIN, END, *marks], **{"bos_token": BEGIN, "eos_token": END, **named})
    made.chat_template = template
    return made


def targets(features, tokenizer):
    """Return the targets as text."""
    ids, is_target = features.arrays["input_ids"].astype(int), features.arrays["is_target"]
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_target, [False]]).astype(int)))
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(edges[::2], edges[1::2], strict=True)]
