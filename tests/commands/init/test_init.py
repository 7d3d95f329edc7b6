import pytest

from finetune.commands.init.init import make_recipe, recipes
from finetune.errors import UserError


def test_the_quickstart_brings_its_data(tmp_path):
    paths = make_recipe("quickstart", tmp_path / "quickstart")
    assert [path.name for path in paths] == ["job.yaml", "train.jsonl", "held_out.jsonl"]
    assert all(path.is_file() for path in paths)


def test_writing_a_recipe_twice_changes_no_file(tmp_path):
    paths = make_recipe("quickstart", tmp_path)
    (tmp_path / "runs").mkdir()  # what a run left there is nobody's business
    before = [path.stat().st_mtime_ns for path in paths]
    assert make_recipe("quickstart", tmp_path) == paths
    assert [path.stat().st_mtime_ns for path in paths] == before


def test_a_missing_file_is_made_again(tmp_path):
    _, train, _ = make_recipe("quickstart", tmp_path)
    content = train.read_bytes()
    train.unlink()
    make_recipe("quickstart", tmp_path)
    assert train.read_bytes() == content


def test_a_changed_job_is_never_overwritten(tmp_path):
    (tmp_path / "job.yaml").write_text("mine\n")
    with pytest.raises(UserError, match=r"already holds job\.yaml with different content.*--into"):
        make_recipe("quickstart", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine\n"


def test_an_unknown_recipe_is_answered_with_the_list(tmp_path):
    with pytest.raises(UserError, match=r"Unknown recipe `quikstart`\. Available: .*quickstart"):
        make_recipe("quikstart", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../errors", "sub/quickstart", ""])
def test_a_path_is_rejected_as_a_recipe_name(tmp_path, name):
    with pytest.raises(UserError, match="Unknown recipe"):
        make_recipe(name, tmp_path)


def test_every_recipe_has_a_description_of_one_sentence():
    told = recipes()
    assert set(told) >= {"quickstart", "sft-lora", "sft-full", "sft-jsonl", "pretrain"}
    for sentence in told.values():
        assert 20 < len(sentence) < 160 and sentence.endswith(".")
