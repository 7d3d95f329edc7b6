"""Files, folders and globs of this machine, and links that lead out of them."""

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.local import find_local
from finetune.errors import DataError

KEY = "data.train"


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two files of rows and a folder in it."""
    made = tmp_path / "rows"
    (made / "old").mkdir(parents=True)
    for name in ("b.jsonl", "a.jsonl.gz", "old/c.jsonl"):
        (made / name).touch()
    return made


def found(path, said=None, **keys):
    files = find_local(SourceSection(path=str(path), **keys), key=KEY, say=(said if said is not None else []).append)
    return [place.path.name for place in files.places]


def test_a_folder_is_all_files_in_it_and_what_is_not_read_is_said(folder):
    for name in ("README.md", ".hidden.jsonl", "_SUCCESS"):
        (folder / name).touch()
    said = []
    assert found(folder, said) == ["a.jsonl.gz", "b.jsonl"]
    assert said == [f"{KEY}.path: {folder} also has README.md, old/, which are not read"]


def test_a_folder_holds_files_of_one_kind(folder):
    (folder / "d.csv").touch()
    with pytest.raises(DataError, match=r"several kinds \(1 .csv, 2 .jsonl\). Name one kind: .*/\*.csv"):
        found(folder)


def test_a_folder_without_rows_says_what_it_has(tmp_path):
    with pytest.raises(DataError, match=r"holds no rows: it has no files. For folders in it, write .*/\*\*/\*.jsonl"):
        found(tmp_path)
    (tmp_path / "notes.md").touch()
    with pytest.raises(DataError, match=r"it has only .*notes\.md"):
        found(tmp_path)


def test_a_glob_reads_its_files_by_name(folder):
    assert found(folder / "**" / "*.jsonl*") == ["a.jsonl.gz", "b.jsonl", "c.jsonl"]
    assert found(folder / "[b]*") == ["b.jsonl"]


def test_a_name_that_looks_like_a_glob_is_a_file_where_there_is_one(folder):
    (folder / "[b].jsonl").touch()
    assert found(folder / "[b].jsonl") == ["[b].jsonl"]


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing/*.jsonl"])
def test_what_is_not_there_is_named(folder, name):
    with pytest.raises(DataError, match=r"nothing.*: there is no such file"):
        found(folder / name)


def test_a_kind_that_cannot_be_read_is_named_with_those_that_can(folder):
    (folder / "rows.xlsx").touch()
    with pytest.raises(DataError, match=r"rows.xlsx: cannot tell how to read it. Known endings: .jsonl, .json, .csv"):
        found(folder / "rows.xlsx")
    (folder / "rows.parquet.gz").touch()
    with pytest.raises(DataError, match=r"the texts also with \.gz or \.zst"):
        found(folder / "rows.parquet.gz")


@pytest.mark.parametrize("pattern", ["", "*.jsonl", "**/*.jsonl"])
def test_a_link_out_of_a_folder_is_followed_only_knowingly(folder, tmp_path, pattern):
    (tmp_path / "secret.jsonl").touch()
    (folder / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    path = f"{folder}/{pattern}".rstrip("/")
    with pytest.raises(DataError, match=r"link.jsonl is a link to .*secret.jsonl, outside of"):
        found(path)
    assert "link.jsonl" in found(path, follow_links=True)


def test_a_link_to_a_folder_is_no_way_around_it(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.jsonl").touch()
    (folder / "away").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"outside of .*rows\. .* set data.train.follow_links: true"):
        found(folder / "*" / "*.jsonl")


def test_a_link_within_the_folder_is_no_matter(folder):
    (folder / "again.jsonl").symlink_to(folder / "old" / "c.jsonl")
    assert found(folder / "*.jsonl") == ["again.jsonl", "b.jsonl"]


def test_a_path_that_is_a_link_is_the_users_word_and_said(folder, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(folder / "b.jsonl")
    said = []
    assert found(tmp_path / "link.jsonl", said) == ["link.jsonl"]
    assert said == [f"{KEY}.path: {tmp_path}/link.jsonl is a link to {folder}/b.jsonl"]
