"""A small byte-level BPE tokenizer, sections and sources for the tests of the data wing."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.token_cache import chunks
from tests.small_models import byte_tokenizer

SAID = [
    "What is two and two?",
    "Two and two is four.",
    "Hello there!\nHow are you?",
    "I am fine, thank you.",
    "Be brief.",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """Return a function that trains a tokenizer on a few sentences."""

    def make(special: Sequence[str] = SPECIAL, **named: Any) -> PreTrainedTokenizerFast:
        return byte_tokenizer(SAID * 4, special=special, **{"eos_token": "<|endoftext|>", **named})

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., PreTrainedTokenizerFast]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the chatml template."""
    made = make_tokenizer()
    set_chat_template(made, "chatml")
    return made


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., TrainingSourceSection]:
    """Return a function that writes rows as JSON lines and returns them as a source."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl", **keys: Any) -> TrainingSourceSection:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return TrainingSourceSection(path=str(path), **keys)

    return write


@pytest.fixture
def make_section(tmp_path: Path) -> Callable[..., DataSection]:
    """Return a function that makes a data section with a cache of its own."""

    def make(source: TrainingSourceSection, **keys: Any) -> DataSection:
        return DataSection(**{"train": source, "max_length": 64, "cache_folder": str(tmp_path / "cache"), **keys})

    return make


@pytest.fixture
def only_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing encoded in the main process, neither first nor while workers start."""
    monkeypatch.setattr(chunks, "CHUNKS_BEFORE_WORKERS", 0)
    monkeypatch.setattr(chunks.EncoderPool, "_is_worker_ready", lambda encoders: True)
