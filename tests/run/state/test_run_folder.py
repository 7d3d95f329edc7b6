"""The tokenizer that a run keeps is accepted only as it was written."""

import pytest

from finetune.errors import UserError
from finetune.run.state.run_folder import _require_undamaged
from finetune.runtime.files.digests import DIGESTS_FILE, write_folder_digests
from tests.refusals import refused


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": "bpe"}')
    (tmp_path / "task_facts.json").write_text("{}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    write_folder_digests(tmp_path)
    return tmp_path


def test_undamaged_run_inputs_and_folders_without_digests_pass_the_check(inputs):
    _require_undamaged(inputs)
    (inputs / "tokenizer.json").write_text('{"model": "bqe"}')
    (inputs / DIGESTS_FILE).unlink()
    _require_undamaged(inputs)


def test_a_file_that_is_not_as_it_was_written_is_named(inputs):
    (inputs / "tokenizer.json").write_text('{"model": "bqe"}')
    (inputs / "task_facts.json").unlink()
    (inputs / "additional_chat_templates" / "tools.jinja").write_text("{{ evil }}")
    with refused(UserError, "additional_chat_templates/tools.jinja, task_facts.json, tokenizer.json", "digests.json"):
        _require_undamaged(inputs)


@pytest.mark.parametrize("content", ["[]", "{", '{"tokenizer.json": 3}', "[" * 100_000])
def test_digests_that_are_damaged_are_named(inputs, content):
    (inputs / DIGESTS_FILE).write_text(content)
    with refused(UserError, "digests.json"):
        _require_undamaged(inputs)
