"""What a row may hold as its image."""

import base64

import pytest

from finetune.data.images.stored_image import folder_of, stored_image
from finetune.errors import DataError

CONTENT = bytes(range(256))


def test_a_relative_path_counts_from_the_folder(tmp_path):
    (tmp_path / "one.png").write_bytes(CONTENT)
    image = stored_image("one.png", folder=tmp_path)
    assert image.read() == CONTENT
    assert image.name == str(tmp_path / "one.png")
    assert stored_image(str(tmp_path / "one.png"), folder=None).read() == CONTENT


@pytest.mark.parametrize(
    "value",
    [
        CONTENT,
        bytearray(CONTENT),
        {"bytes": CONTENT, "path": "cat.png"},
        base64.b64encode(CONTENT).decode(),
        "data:image/png;base64," + base64.b64encode(CONTENT).decode(),
    ],
)
def test_stored_image_bytes_are_read_unchanged(value):
    assert stored_image(value, folder=None).read() == CONTENT


def test_equal_image_bytes_have_equal_digests_inline_or_in_a_file(tmp_path):
    (tmp_path / "one.png").write_bytes(CONTENT)
    held = stored_image({"bytes": CONTENT, "path": "two.png"}, folder=None)
    assert held.name == "two.png"
    assert stored_image({"path": "one.png"}, folder=tmp_path).digest() == held.digest()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("https://example.org/cat.png", "not downloaded"),
        ("cat.png", "do not come from a local folder"),
        ({"path": None}, "neither bytes nor a path"),
        (7, "is a number"),
        ([1, 2], "is a list"),
        ("", "is empty"),
        ("x?" * 40, "nor valid base64"),
    ],
)
def test_a_value_that_is_not_an_image_is_rejected_with_the_column(value, reason):
    with pytest.raises(DataError, match=f"column `image`.*{reason}"):
        stored_image(value, folder=None, title="column `image`")


def test_a_missing_image_file_is_reported_when_it_is_read(tmp_path):
    image = stored_image("gone.png", folder=tmp_path)
    with pytest.raises(DataError, match=r"gone\.png does not exist"):
        image.read()


def test_rows_of_a_folder_count_from_it_and_rows_elsewhere_from_nowhere(tmp_path):
    assert folder_of(str(tmp_path)) == tmp_path
    assert folder_of(str(tmp_path / "rows.jsonl")) == tmp_path
    assert folder_of("`uoft-cs/cifar10`, split train") is None
