"""The record beside `final/`: what it says is believed only where it says all of it."""

import json

import pytest

from finetune.config.sections.export import ExportSection
from finetune.run.over import is_exported, read_record

SECTION = ExportSection()
RECORD = {"step": 8, "reason": "finished", "export": SECTION.model_dump(), "files": {"config.json": 2}}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "final.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_what_was_exported_so_after_this_step_is_there(run):
    assert is_exported(run, step=8, section=SECTION)
    assert not is_exported(run, step=9, section=SECTION)
    (run / "final" / "config.json").write_text("{} ")
    assert not is_exported(run, step=8, section=SECTION)


DAMAGED = {
    "a list": b"[]",
    "no JSON": b"{",
    "nested too deep": b"[" * 200_000,
    "files that are none": json.dumps(RECORD | {"files": []}).encode(),
    "a step that is text": json.dumps(RECORD | {"step": "8"}).encode(),
    "more than there is": json.dumps(RECORD | {"more": 1}).encode(),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_record_is_none_and_the_export_is_made_again(run, what):
    (run / "final.json").write_bytes(DAMAGED[what])
    assert read_record(run) is None
    assert not is_exported(run, step=8, section=SECTION)
