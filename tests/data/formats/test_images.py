"""Rows that show images: parts, placeholders, a column; as many places as images."""

from pathlib import Path

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import NOTES
from finetune.data.formats.conversations import UNREAD_IMAGE
from finetune.data.formats.row_format import UNREAD, choose_format
from finetune.data.rows import RawRow
from finetune.data.sources.source import texts
from finetune.errors import DataError
from tests.refusals import refused

IMAGE, ANSWER = {"type": "image"}, {"role": "assistant", "content": "A cat."}


def said(text):
    return {"type": "text", "text": text}


def asked(content):
    return {"role": "user", "content": content}


def read(row, **keys):
    raw = RawRow("/rows/rows.jsonl", 1, row)
    section = SourceSection(path="/rows/rows.jsonl", **keys)
    return choose_format(section, raw, key="data.train", log=lambda _: None).read(raw)


ROWS = {
    "parts and a column": (
        {"messages": [asked([IMAGE, said("What?")]), ANSWER], "images": ["a.png"]},
        [IMAGE, said("What?")],
        ["a.png"],
    ),
    "parts with their images": (
        {"messages": [asked([{"type": "image", "path": "a.png"}, said("What?")]), ANSWER]},
        [IMAGE, said("What?")],
        ["a.png"],
    ),
    "OpenAI's parts": (
        {"messages": [asked([said("What?"), {"type": "image_url", "image_url": {"url": "a.png"}}]), ANSWER]},
        [said("What?"), IMAGE],
        ["a.png"],
    ),
    "parts that name a place in the column": (
        {
            "messages": [asked([{"type": "image", "index": 1}, {"type": "image", "index": 0}]), ANSWER],
            "images": ["a.png", "b.png"],
        },
        [IMAGE, IMAGE],
        ["b.png", "a.png"],
    ),
    "placeholders": (
        {"messages": [asked("Is <image> like\n<image>\nor not?"), ANSWER], "images": ["a.png", "b.png"]},
        [said("Is"), IMAGE, said("like"), IMAGE, said("or not?")],
        ["a.png", "b.png"],
    ),
    "LLaVA's rows": (
        {"conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat."}]}
        | {"image": "a.png"},
        [IMAGE, said("What?")],
        ["a.png"],
    ),
    "no place": (
        {"messages": [asked("What?"), ANSWER], "images": ["a.png", "b.png"]},
        [IMAGE, IMAGE, said("What?")],
        ["a.png", "b.png"],
    ),
    "a prompt": ({"prompt": "What?", "completion": "A cat.", "images": "a.png"}, [IMAGE, said("What?")], ["a.png"]),
    "an instruction": (
        {"instruction": "What?", "output": "A cat.", "images": ["a.png", None]},
        [IMAGE, said("What?")],
        ["a.png"],
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_images_stand_where_the_row_shows_them(kind):
    row, content, names = ROWS[kind]
    keys = {"columns": {"images": "image"}} if "image" in row else {}
    found = read(row, **keys)
    assert found["messages"][0]["content"] == content
    assert found["messages"][1]["content"] == "A cat."
    assert [image.path for image in found["images"]] == [Path("/rows") / name for name in names]


WRONG = {
    "too few places": {"messages": [asked("<image>?"), ANSWER], "images": ["a.png", "b.png"]},
    "too few images": {"messages": [asked([IMAGE, IMAGE]), ANSWER], "images": ["a.png"]},
    "an index twice": {
        "messages": [asked([{**IMAGE, "index": 0}, {**IMAGE, "index": 0}]), ANSWER],
        "images": ["a.png", "b.png"],
    },
    "an answer that is drawn": {
        "messages": [asked("Draw."), {"role": "assistant", "content": [IMAGE]}],
        "images": ["a.png"],
    },
    "nobody who asks": {"messages": [ANSWER], "images": ["a.png"]},
    "a film": {"messages": [asked([IMAGE, {"type": "video"}]), ANSWER], "images": ["a.png"]},
    "a page in the web": {"messages": [asked("What?"), ANSWER], "images": ["https://example.org/a.png"]},
    "several texts": {"messages": [asked([said("a"), said("b")]), ANSWER], "images": ["a.png"]},
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_image_row_is_rejected_with_the_reason(kind):
    with refused(DataError, "rows.jsonl, row 1"):
        read(WRONG[kind])


def test_a_tokenizer_is_trained_on_the_texts_between_the_images():
    class Source:
        format = choose_format(
            SourceSection(path="/rows/rows.jsonl"),
            first := RawRow("/rows/rows.jsonl", 1, ROWS["placeholders"][0]),
            key="data.train",
            log=lambda _: None,
        )

        def excerpt(self):
            return iter([self.first])

    assert list(texts([Source()])) == ["Is", "like", "or not?", "A cat."]


@pytest.mark.parametrize("value", ["cats/1.JPG", ["a.png", "b.webp"], {"bytes": b"1", "path": None}, b"1"])
def test_a_column_of_images_that_the_job_does_not_read_is_noted(value):
    row = {"messages": [asked("What?"), ANSWER], "photo": value}
    assert read(row) == {"messages": row["messages"], UNREAD_IMAGE: "photo", NOTES: (UNREAD,)}


def test_a_row_without_the_image_that_the_job_maps_has_none():
    row = {"messages": [asked("What?"), ANSWER], "image": None, "thumbnail": "a.png"}
    assert read(row, columns={"images": "image"}) == {"messages": row["messages"]}
    assert read(row, template={"images": "{{ image or '' }}"}) == {"messages": row["messages"]}


def test_a_template_of_images_may_render_a_list():
    row = {"messages": [asked("What?"), ANSWER], "first": "a.png", "second": "b.png"}
    images = read(row, template={"images": "{{ [first, second] | tojson }}"})["images"]
    assert [Path(image.name).name for image in images] == ["a.png", "b.png"]
