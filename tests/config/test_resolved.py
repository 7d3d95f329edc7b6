"""A run's config is read back from its folder, wherever that is by now and whatever has become of its data."""

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from finetune.config.resolved import load_resolved
from finetune.errors import UserError
from finetune.runtime.terminal import neutral


@pytest.fixture
def run(job, tmp_path):
    """The folder of a run whose data is gone."""
    folder = tmp_path / "moved"
    folder.mkdir()
    (folder / "resolved.yaml").write_text(resolved_yaml(load_config(job)))
    (tmp_path / "rows.jsonl").unlink()
    return folder


def test_it_is_the_config_that_was_run_in_the_folder_where_it_lies(run, tmp_path):
    loaded = load_resolved(run)
    assert loaded.config.run.folder == str(run)
    assert loaded.config.data.train.path == str(tmp_path / "rows.jsonl")
    assert loaded.config.train.learning_rate == 1e-4
    assert loaded.text == (run / "resolved.yaml").read_text()


def test_a_folder_without_it_is_no_run(tmp_path):
    with pytest.raises(UserError, match=r"resolved\.yaml: cannot be read .*Name the folder of a run"):
        load_resolved(tmp_path)


def test_a_file_of_another_version_is_told_with_the_key_that_is_not_known(run):
    path = run / "resolved.yaml"
    path.write_text(path.read_text().replace("learning_rate:", "lerning_rate:"))
    with pytest.raises(UserError, match=r"another version of finetune: train\.learning_rate: Field required"):
        load_resolved(run)


def test_what_acts_on_a_terminal_is_read_back_and_stands_there_as_an_escape(job, tmp_path):
    meant = "a\x1b]8;;x\x07 \x9b\u202e\u2028\ufeff\U000e0041 ü"
    written_so = neutral(meant.replace("\x1b", "\\e").replace("\x07", "\\a"))
    evil = job.with_name("jo\x9bb\u202e.yaml")
    evil.write_text(job.read_text().replace("max_length: 64", f'max_length: 64\n  system_prompt: "{written_so}"'))
    written = resolved_yaml(load_config(evil))
    assert neutral(written) == written
    (tmp_path / "resolved.yaml").write_text(written)
    assert load_resolved(tmp_path).config.data.system_prompt == meant


def test_secrets_are_not_written_down(job):
    signed = 'data.train.path="https://h/x.jsonl?sig=c0ffee"'
    written = resolved_yaml(load_config(job, [signed, "export.push_to_hub=me/hf_c0ffeeAbcdefghijklmn"]))
    assert "https://h/x.jsonl?sig=[redacted]" in written
    assert "c0ffee" not in written
