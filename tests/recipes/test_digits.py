import sys
from io import BytesIO

import pytest
from PIL import Image

from finetune.commands.init.init import format_written
from finetune.errors import MissingPackage
from finetune.recipes.digits import digit_files


def test_every_digit_is_a_small_image_in_the_folder_of_its_class():
    files = digit_files()
    assert len(files) == 1797
    parts = [path.split("/")[0] for path in files]
    assert (parts.count("train"), parts.count("held_out")) == (1437, 360)
    assert {path.split("/")[1] for path in files} == set("0123456789")
    image = Image.open(BytesIO(files["held_out/0/0000.png"]))
    assert (image.size, image.mode, image.getextrema()) == ((8, 8), "L", (0, 239))


def test_a_missing_scikit_learn_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(MissingPackage, match=r"image-digits .*scikit-learn.*pip install 'finetune-accelerate\[dev\]'"):
        digit_files()


def test_many_written_files_are_summarized_in_one_line(tmp_path):
    paths = [tmp_path / "job.yaml", *(tmp_path / "train" / label / "1.png" for label in "abcdef")]
    assert list(format_written(paths)) == [str(tmp_path / "job.yaml"), f"6 files in {tmp_path / 'train'}"]
