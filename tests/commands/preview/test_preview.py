"""What a preview shows is what the model is given, and no row can write anything but text into it."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from finetune.commands.preview.batches import Piece, PreviewBatch, PreviewPosition, PreviewSample, pieces_of, visible
from finetune.commands.preview.preview import forward_rows, plain_text, preview
from finetune.data.features import Features
from finetune.errors import UserError
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

    def show(*overrides, num_rows=6, html=None, start=0):
        preview(job, overrides, num_rows=num_rows, html=html, start=start)
        return capsys.readouterr().out

    return show


class Page(HTMLParser):
    """What a browser would make of the page: its tags, and the text of tokens by what they are in."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.target, self.read = [], [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(dict(attrs).get("class", ""))

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        if "target" in self.open and "legend" not in self.open:
            self.target += data
        elif "context" in self.open and "legend" not in self.open:
            self.read += data


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    texts = ["say moon", "say star", "moon and star"] * 20
    folder = tmp_path_factory.mktemp("cache")
    return train_or_load_tokenizer(lambda: texts, vocabulary_size=300, cache_folder=folder, log=lambda _: None)


def sample_of(text, tokenizer, *, target_from):
    ids = tokenizer(text)["input_ids"]
    is_target = [place >= target_from for place in range(len(ids))]
    features = Features({"input_ids": np.array(ids, np.uint32), "is_target": np.array(is_target)})
    pieces = tuple(pieces_of(features, tokenizer))
    return PreviewSample(0, "rows.jsonl, row 1", pieces, features.length, features.num_targets)


def test_the_pieces_together_are_the_text_and_the_tokens(tokenizer):
    text = "say  moon\tand ☕ «star»\n"
    sample = sample_of(text, tokenizer, target_from=4)
    assert "".join(piece.text for piece in sample.pieces) == text
    assert [i for piece in sample.pieces for i in piece.ids] == tokenizer(text)["input_ids"]
    assert sum(len(piece.ids) for piece in sample.pieces if piece.is_target) == sample.num_targets


def test_bytes_that_only_together_are_a_character_are_one_piece(tokenizer):
    (cup,) = [piece for piece in sample_of("☕", tokenizer, target_from=9).pieces if piece.text == "☕"]
    assert len(cup.ids) == 3


def test_tokens_of_one_character_with_different_target_flags_are_previewed_separately(tokenizer):
    first, *others = sample_of("☕", tokenizer, target_from=1).pieces
    assert not first.is_target and len(first.ids) == 1
    assert all(piece.is_target for piece in others) and sum(len(piece.ids) for piece in others) == 2


def test_blanks_and_control_characters_are_seen():
    assert visible("a b\tc\n") == "a·b⇥c↵\n"
    assert visible("\x1b[0m") == "⟨1B⟩[0m"


def test_targets_stand_in_brackets_without_colors():
    pieces = [Piece((1,), "Hi", False, False), Piece((2,), " you", True, False), Piece((3,), "\n", True, False)]
    sample = PreviewSample(0, "row 1", (*pieces, Piece((4,), "end", True, True)), 4, 3)
    assert plain_text(sample) == "Hi⟦·you┊↵\nend⟧"


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


def test_the_page_shows_the_same_and_runs_nothing(shown, tmp_path):
    shown("data.shuffle=false", html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "<script" not in text and "&lt;script&gt;" not in page.read
    assert "<script>alert('x')</script>·&·⟨1B⟩[31mred" in page.read  # as text: a browser shows it
    assert "moon<|im_end|>" in page.target and "tee·☕<|im_end|>" in page.target
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme: dark" in text


def test_a_page_has_charts_tiles_and_the_audit(shown, tmp_path):
    shown("data.batching.by=packs", "data.batching.tokens=256", html=tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for part in ("Length of samples", "Share of targets in a sample", "Pack at position 0", "filled", "duplicates"):
        assert part in text


def test_a_page_needs_a_file_to_be_written_to(job, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"is a folder\. Pass a file: .*preview\.html"):
        preview(job, [], num_rows=1, html=tmp_path, start=0)
    with pytest.raises(UserError, match="cannot be written"):
        preview(job, [], num_rows=1, html=tmp_path / "file" / "page.html", start=0)


def test_lanes_are_in_proportion():
    pieces = (Piece((1, 2), "a", False, False), Piece((3,), "b", True, False))
    position = PreviewPosition(0, (PreviewSample(0, "row 1", pieces, 3, 1),), num_samples=2, num_tokens=7)
    numbers = {"step": 1, "number": 1, "of": 1, "first_position": 0, "last_position": 1, "positions": (position,)}
    padded = PreviewBatch(**numbers, num_samples=2, num_tokens=7, num_targets=1, num_lanes=2, num_computed=8)
    assert forward_rows(padded) == [("row 1: 3 tokens", [("context first", 50.0), ("target", 25.0), ("padding", 25.0)])]
    packed = PreviewBatch(**numbers, num_samples=2, num_tokens=7, num_targets=1, num_lanes=1, num_computed=7)
    assert [role for role, _ in forward_rows(packed)[0][1]] == ["context first", "target", "hidden"]
