"""Rows in public layouts are recognized, and the proposed keys read them as they are meant."""

import json

import pytest
from PIL import Image

from finetune import register
from finetune.config.sections.data import AuditSection, TrainingSourceSection
from finetune.data.formats.layouts import describe_unused, recognize_all
from finetune.data.sources.source import open_source
from finetune.data.token_cache.chunks import Encoding, encode_chunk
from finetune.data.token_cache.counts import exceeded_shares
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError, RegistryError
from finetune.registry.formats import FORMATS
from finetune.registry.layouts import LAYOUTS, LayoutEntry, shipped_layouts
from finetune.registry.tasks import TASKS
from finetune.registry.turns import find_role
from tests.data.formats.public_layouts import CHAT, PUBLIC, A, B, Q
from tests.data.formats.shared_layouts import FOLDER, SHARED
from tests.refusals import refused


def content(turn):
    if turn.get("tool_calls"):
        calls = [call.get("function", call) for call in turn["tool_calls"]]
        return [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    parts = turn["content"]
    if isinstance(parts, list):
        return "".join("<image>" if part["type"] == "image" else part["text"] for part in parts)
    return parts


def shown(turns):
    return " | ".join(f"{find_role(turn['role']).role}: {content(turn)}" for turn in turns)


def meaning(row):
    """Return what a row that its format has read trains: context and target, texts and label, ..."""
    if "messages" in row:
        return shown(row["messages"][:-1]).replace("<image>", ""), content(row["messages"][-1])
    if "chosen" in row:
        return shown(row["prompt"]), shown(row["chosen"])[11:], shown(row["rejected"])[11:]
    if "is_good" in row:
        return shown(row["prompt"]), shown(row["completion"])[11:], row["is_good"]
    if "anchor" in row:
        return row["anchor"], row["positive"], row["negatives"]
    if "tokens" in row:
        return list(row["tokens"]), list(row["tags"])
    if "score" in row:
        return row["text"], row["text_pair"], row["score"]
    if "label" in row:
        label = row["label"]
        label = [name for name, is_one in label.items() if is_one] if isinstance(label, dict) else label
        return (*(row[name] for name in ("text", "text_pair") if name in row), label) if "text" in row else label
    return row["text"]


def first_reading(rows):
    layout = next(recognize_all(rows), None)
    return layout, None if layout is None else next(layout.readings(), None)


def read_rows(path, keys):
    source = open_source(TrainingSourceSection(path=str(path), **keys.source), key="data.train", log=lambda _: None)
    return [source.format.read(raw) for raw in source.rows()]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_row_of_a_public_layout_is_read_as_it_is_meant(tmp_path, name):
    row, expected_layout, expected = PUBLIC[name]
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    layout, keys = first_reading([row])
    assert layout.entry.name == expected_layout
    if expected is None:
        assert keys is None and layout.entry.remedy
        return
    (read,) = read_rows(tmp_path / "rows.jsonl", keys)
    assert meaning(read) == expected
    assert keys.format in TASKS[keys.task].formats


@pytest.mark.parametrize("name", SHARED)
def test_the_rows_of_a_shared_layout_are_read_as_they_are_meant(tmp_path, name):
    path = FOLDER / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    (tmp_path / "images").mkdir()
    for number in range(len(rows)):
        Image.new("RGB", (8, 8)).save(tmp_path / f"images/{number}.png")
    (tmp_path / path.name).write_text(path.read_text())
    layout, keys = first_reading(rows)
    if SHARED[name] is None:
        assert keys is None and layout.entry.remedy
        return
    read = read_rows(tmp_path / path.name, keys)
    assert len(read) == len(rows) == 8
    assert [meaning(row) for row in read] == [SHARED[name](row) for row in rows]


def test_every_reading_of_the_table_names_roles_columns_and_tasks_that_exist():
    for entry in shipped_layouts().layouts:
        for reading in entry.readings:
            assert reading.format in TASKS[reading.task].formats or reading.task == "vision_language_sft", entry.name
            assert {*reading.columns, *reading.template} <= set(FORMATS[reading.format].columns), entry.name
            assert set(reading.columns.values()) <= set(entry.roles), entry.name


def test_a_column_that_changes_the_meaning_is_named_with_what_reads_it():
    row = {"question": Q, "answer": A, "score": 3, "id": 7, "title": Q, "context": None}
    layout, _ = first_reading([row])
    lines = list(describe_unused(layout))
    assert next(line for line in lines if "score" in line).startswith("`score` ranks the row")
    assert {"`title`: repeated in what is read", "`id`, `context`"} <= set(lines)
    assert len(lines) == 3


def test_the_first_of_several_right_answers_is_read_and_reported():
    layout, keys = first_reading([{"question": Q, "answers": [A, B]}])
    assert keys.source["template"] == {"completion": "{{ answers[0] if answers else '' }}"}
    assert any("`answers`" in line and "first" in line for line in describe_unused(layout))


def test_a_layout_of_a_plugin_comes_first():
    try:
        register.layout(
            "ours",
            description="a riddle",
            roles={"prompt": "text: riddle", "completion": "text: key"},
            readings=[{"task": "sft", "format": "prompt_completion"}],
        )
        layout, keys = first_reading([{"riddle": Q, "key": A, "text": "x"}])
        assert (layout.entry.name, keys.source["columns"]) == ("ours", {"prompt": "riddle", "completion": "key"})
    finally:
        LAYOUTS.remove_plugin(next(entry.plugin for entry in LAYOUTS))
    with refused(RegistryError):
        LayoutEntry(name="empty", description="nothing", roles={})


def opened(tmp_path, rows, **keys):
    """Return the log of opening rows as a job does."""
    path, log = tmp_path / "rows.jsonl", []
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(TrainingSourceSection(path=str(path), **keys), key="data.train", log=log.append)
    return source, [line for line in log if line.startswith("warning: ")]


def test_a_job_that_trains_judged_answers_as_good_ones_is_warned_and_the_rows_are_counted(tmp_path):
    rows = [{"prompt": Q, "completion": A, "label": value} for value in (True, False, None)]
    source, warnings = opened(tmp_path, rows, format="prompt_completion")
    assert [("`label`" in line, "judged" in line) for line in warnings] == [(True, True), (False, True)]
    encoding = Encoding(
        lambda read: [None for _ in read], None, {}, length=SampleLengthLimit(8, "refuse"), format=source.format
    )
    counts = encode_chunk(encoding, list(source.rows())).counts
    assert counts.unread_rows == 2
    assert any("2 rows" in line for line in counts.lines())
    (share,) = exceeded_shares(counts, 0, AuditSection(max_unread_rows=0.5))
    assert (share.name, share.num, share.among) == ("unread_rows", 2, 3)


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"messages": CHAT, "id": 1, "source": "x"}, {}),
        ({"text": Q, "label": 1}, {"format": "labelled"}),
        ({"prompt": Q, "completion": A, "label": True}, {"format": "judged"}),
        ({"prompt": Q, "completion": A, "system": "", "context": None}, {}),
        ({"prompt": Q, "completion": A, "score": 3}, {"template": {"prompt": "{{ row.prompt }} {{ row.score }}"}}),
    ],
)
def test_a_job_that_reads_all_that_matters_is_not_warned(tmp_path, row, keys):
    assert opened(tmp_path, [row], **keys)[1] == []


def test_messages_of_a_tree_that_are_read_as_texts_are_a_warning(tmp_path):
    row = {"message_id": "1", "parent_id": None, "role": "prompter", "text": Q}
    _, warnings = opened(tmp_path, [row])
    assert len(warnings) == 1
    assert "tree of conversations" in warnings[0]


def test_rows_that_no_format_reads_get_the_lines_that_do(tmp_path):
    with refused(DataError, "rows.jsonl, row 1", '"prompt": "history"'):
        opened(tmp_path, [{"history": Q, "human_ref_A": A, "human_ref_B": B, "labels": 1}])
