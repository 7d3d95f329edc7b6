"""The lines that `preview FILE` prints make a job that checks, prepares and trains on every row that means something.

What a row means is tested in tests/data/formats/test_layouts.py.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from finetune.commands.preview.file import preview_file
from finetune.config.load import load_config
from finetune.run.setup.training_data import make_training_data
from tests.data.formats.public_layouts import PUBLIC
from tests.data.formats.shared_layouts import FOLDER, SHARED
from tests.scenarios.trained import train_here
from tests.small_models import byte_tokenizer
from tests.task_cases.vision_language import processor

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

SIZES = "hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2"
LLAMA = f"{{model_type: llama, values: {{{SIZES}}}}}"
BERT = f"{{model_type: bert, values: {{{SIZES}}}}}"
LLAVA = f"""{{model_type: llava, values: {{
    text_config: {{model_type: llama, {SIZES}}},
    vision_config: {{model_type: clip_vision_model, {SIZES}, image_size: 16, patch_size: 8}}}}}}"""
MODELS = {
    "vision_language_sft": f"{{from_config: {LLAVA}, tokenizer: {{name: ./processor}}}}",
    **dict.fromkeys(
        ("text_classification", "token_classification", "embedding", "reranking"),
        f"{{from_config: {BERT}, tokenizer: {{name: ./tokenizer}}}}",
    ),
}
REST = """
run: {{folder: runs/layout}}
model: {model}
train: {{global_batch_size: 2, microbatch_size: 1, steps: 3, learning_rate: 1e-3}}
report: {{console: plain}}
export: {{verify: false}}
"""
CHATS = ("sft", "preference", "reward")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder with the tokenizer and the processor of the jobs."""
    folder = tmp_path_factory.mktemp("models")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>", "<|pad|>"]
    byte_tokenizer(special=special, pad_token="<|pad|>", unk_token="<unk>").save_pretrained(folder / "tokenizer")
    processor().save_pretrained(folder / "processor")
    return folder


def write_job(folder: Path, models: Path, path: Path) -> Path | None:
    """Return the job of the lines that are printed for the file; None where its rows are not training rows."""
    for name in ("tokenizer", "processor"):
        (folder / name).symlink_to(models / name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        preview_file(str(path), num_rows=1, tokenizer=None)
    lines = printed.getvalue().partition("Add to the job:\n\n")[2]
    if not lines:
        return None
    task = re.search(r"^task: \{name: (\w+)", lines, re.MULTILINE)[1]
    lines = (
        lines.replace("max_length: 512", "max_length: 512" if "bert" in MODELS.get(task, "") else "max_length: 4096")
        .replace("  max_length", ("  chat_template: qwen\n" if task in CHATS else "") + "  max_length", 1)
        .replace("data:\n", f"data:\n  cache_folder: {folder}/cache\n", 1)
    )
    job = folder / "job.yaml"
    job.write_text(
        REST.format(model=MODELS.get(task, f"{{from_config: {LLAMA}, tokenizer: {{name: ./tokenizer}}}}")) + lines
    )
    return job


def prepare_and_train(job, expected, *, may_leave_out=False):
    config = load_config(job).config
    data = make_training_data(config, print)
    num_samples = len(data.training.samples)
    kept = [row for row in expected if not may_leave_out or row is not None]
    assert num_samples == len(kept)
    train_here(job)
    losses = [
        json.loads(line)["loss"]
        for line in (job.parent / "runs/layout/events.jsonl").read_text().splitlines()
        if json.loads(line)["event"] == "StepTaken"
    ]
    assert len(losses) == 3


def is_left_out(row):
    """Return whether a row has no label or no positive, so that it is left out and counted."""
    return row[-1] == -1 or (len(row) == 3 and row[1] == "")


@pytest.mark.parametrize("name", SHARED)
def test_the_printed_lines_train_on_what_the_rows_of_a_shared_layout_mean(tmp_path, models, name):
    source = FOLDER / f"{name}.jsonl"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    (tmp_path / "images").mkdir()
    for number in range(len(rows)):
        Image.new("RGB", (16, 16)).save(tmp_path / f"images/{number}.png")
    (tmp_path / source.name).write_text(source.read_text())
    job = write_job(tmp_path, models, tmp_path / source.name)
    if SHARED[name] is None:
        assert job is None
        return
    expected = [SHARED[name](row) for row in rows]
    prepare_and_train(job, [None if is_left_out(row) else row for row in expected], may_leave_out=True)


ONE_CLASS = ("class_of_text", "class_of_two_texts", "entailment", "image_label", "several_classes")
"""Layouts of which a single row has a single class: nothing can be trained."""


@pytest.mark.parametrize("name", [name for name in PUBLIC if PUBLIC[name][1] not in ONE_CLASS])
def test_the_printed_lines_train_on_what_a_row_of_a_public_layout_means(tmp_path, models, name):
    row, _, expected = PUBLIC[name]
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    job = write_job(tmp_path, models, tmp_path / "rows.jsonl")
    if expected is None:
        assert job is None
        return
    prepare_and_train(job, [expected] * 4)
