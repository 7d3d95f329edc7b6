"""What a preview shows is what the model is given, and no row can write anything but text into it."""

import json
import re

import numpy as np
import pytest

from finetune.commands.preview.preview import Piece, pieces_of, plain_text, preview, visible
from finetune.data.features import Features
from finetune.model.processing import train_or_load_tokenizer

JOB = """
run: {folder: run, seed: 3}
model:
  from_config: {model_type: llama, values: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}
  tokenizer: {train: {vocabulary_size: 330}}
data:
  train: {path: rows.jsonl}
  max_length: 96
  over_length: truncate
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
"""
EVIL = "<script>alert('x')</script> & \x1b[31mred"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    rows = [{"prompt": f"Say {word} to {EVIL}", "completion": word} for word in ("moon", "star", "rain", "tee ☕")]
    rows += [{"prompt": "Say all of it", "completion": "and so on " * 40}, rows[0]]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@pytest.fixture
def shown(job, capsys, monkeypatch):
    """Return a function that previews the job and returns what was printed."""
    monkeypatch.setenv("COLUMNS", "160")

    def show(*overrides, num_rows=6, start=0):
        preview(job, overrides, num_rows=num_rows, start=start)
        return capsys.readouterr().out

    return show


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = ["say moon", "say star", "moon and star"] * 20
    folder = tmp_path_factory.mktemp("cache")
    return train_or_load_tokenizer(lambda: texts, vocabulary_size=300, cache_folder=folder, log=lambda _: None)


def pieces(text, tokenizer, *, target_from):
    ids = tokenizer(text)["input_ids"]
    is_target = [place >= target_from for place in range(len(ids))]
    features = Features({"input_ids": np.array(ids, np.uint32), "is_target": np.array(is_target)})
    return list(pieces_of(features, tokenizer))


def test_the_pieces_together_are_the_text_and_the_tokens(tokenizer):
    text = "say  moon\tand ☕ «star»\n"
    parts = pieces(text, tokenizer, target_from=4)
    ids = tokenizer(text)["input_ids"]
    assert "".join(piece.text for piece in parts) == text
    assert [i for piece in parts for i in piece.ids] == ids
    assert sum(len(piece.ids) for piece in parts if piece.is_target) == len(ids) - 4


def test_tokens_of_one_character_with_different_target_flags_are_previewed_separately(tokenizer):
    first, *others = pieces("☕", tokenizer, target_from=1)
    assert not first.is_target and len(first.ids) == 1
    assert all(piece.is_target for piece in others) and sum(len(piece.ids) for piece in others) == 2


def test_blanks_and_control_characters_are_seen():
    assert visible("a b\tc\n") == "a·b⇥c↵\n"
    assert visible("\x1b[0m") == "⟨1B⟩[0m"


def test_targets_stand_in_brackets_without_colors():
    parts = [Piece((1,), "Hi", False, False), Piece((2,), " you", True, False), Piece((3,), "\n", True, False)]
    assert plain_text([*parts, Piece((4,), "end", True, True)]) == "Hi⟦·you┊↵\nend⟧"


def test_the_terminal_shows_rows_in_the_order_of_training(shown):
    said = shown("data.shuffle=false", num_rows=3)
    assert re.findall(r"^position (\d+)  sample (\d+)  \S+rows\.jsonl, row (\d+)", said, re.MULTILINE) == [
        ("0", "0", "1"),
        ("1", "1", "2"),
        ("2", "2", "3"),
    ]
    assert "step 1, microbatch 1 of 2: positions 0 to 1" in said and "2 samples (1 shown)" in said
    assert "moon┊<|im_end|>⟧" in said
    assert "\x1b" not in said  # a row cannot steer the terminal, and there are no colors in a file


def test_preview_starts_at_the_requested_position(shown):
    said = shown("data.shuffle=false", num_rows=1, start=5)
    assert "step 2, microbatch 1 of 2: positions 4 to 5" in said
    assert re.search(r"^position 5  sample 5 ", said, re.MULTILINE)


def test_packs_are_shown_as_packs(shown):
    said = shown("data.batching.by=packs", "data.batching.tokens=256", num_rows=4)
    assert re.search(r"┏━ pack at position 0: \d samples", said)
    assert re.search(r"filled: [\d.]+% of 256 tokens", said)


def test_the_audit_follows(shown):
    said = shown("data.audit.max_truncated_rows=0.1")
    (row,) = re.findall(r"^data\.train .*", said, re.MULTILINE)
    assert row.split()[1:3] == ["6", "6"] and "1 (16.7%)" in row
    assert "LIMIT data.train: 1 of 6 rows were cut or split (16.67%): data.audit.max_truncated_rows allows" in said
    assert "padding: " in said and "lengths: " in said
