"""What is said of images before training: which files, which classes, and nothing of tokens."""

import pytest
from PIL import Image

from finetune.commands.prepare import prepare
from finetune.commands.preview.preview import preview
from finetune.errors import UserError

JOB = """
run: {folder: run, seed: 3}
model:
  from_config: {model_type: resnet}
  image_processor: {size: 12, mean: [0.5], std: [0.5]}
data:
  train: {path: photos}
  cache_folder: cache
task: {name: image_classification, classification: {labels: [cat, dog, fish]}}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for number in range(5):
        path = tmp_path / "photos" / ("cat" if number < 3 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (7, 5), (40 * min(number, 3), 0, 0)).save(path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


def test_the_preview_lists_files_sizes_and_classes(job, capsys):
    preview(job, ["data.shuffle=false"], num_rows=3, start=1)
    said = capsys.readouterr().out
    assert "━━ step 1, microbatch 1 of 2\nposition 1  cat/1.png  7 x 5 PNG" in said
    assert "━━ step 1, microbatch 2 of 2\nposition 2  cat/2.png" in said
    assert f"class `dog`  ({job.parent / 'photos'}, row 4)" in said
    assert "the model sees 1 x 12 x 12 (channels, height, width)" in said


def test_the_audit_of_images_reports_classes_and_no_tokens(job, capsys):
    (job.parent / "photos" / "dog" / "5.png").write_bytes((job.parent / "photos" / "dog" / "4.png").read_bytes())
    prepare(job, [])
    said = capsys.readouterr().out
    assert "classes: 3, from 0 (`fish`) to 3 (`cat`) samples\nclasses without a sample: `fish`" in said
    (row,) = [line for line in said.splitlines() if line.startswith("data.train  ")]
    assert row.split() == ["data.train", "6", "6", "2", "(33.3%)"]  # rows, samples, equal to an earlier one
    assert " tokens" not in said
    assert "target" not in said


def test_a_broken_image_is_named_with_its_row(job):
    (job.parent / "photos" / "cat" / "0.png").write_bytes(b"no image at all")
    with pytest.raises(UserError, match=r"photos, row 1: the image .*cat/0\.png cannot be used: it is not an image"):
        prepare(job, [])
