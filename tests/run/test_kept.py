"""The tokenizer that a run keeps is believed only as it was written."""

import pytest

from finetune.errors import UserError
from finetune.run.kept import DIGESTS, _digests, _refuse_damage


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": "bpe"}')
    (tmp_path / "task_facts.json").write_text("{}")
    (tmp_path / DIGESTS).write_text(str(_digests(tmp_path)).replace("'", '"'))
    return tmp_path


def test_what_is_as_it_was_written_passes_and_so_does_a_folder_without_digests(inputs):
    _refuse_damage(inputs)
    (inputs / "tokenizer.json").write_text('{"model": "bqe"}')
    (inputs / DIGESTS).unlink()
    _refuse_damage(inputs)


def test_a_file_that_is_not_as_it_was_written_is_named(inputs):
    (inputs / "tokenizer.json").write_text('{"model": "bqe"}')
    (inputs / "task_facts.json").unlink()
    with pytest.raises(UserError, match=r"task_facts\.json, tokenizer\.json is not as the run wrote it.*digests\.json"):
        _refuse_damage(inputs)


@pytest.mark.parametrize("content", ["[]", "{", '{"tokenizer.json": 3}', "[" * 100_000])
def test_digests_that_are_damaged_are_named(inputs, content):
    (inputs / DIGESTS).write_text(content)
    with pytest.raises(UserError, match=r"digests\.json: cannot be read"):
        _refuse_damage(inputs)
