"""Remote folders, in memory and on a real S3 server."""

import pytest

from finetune.errors import MissingPackage
from finetune.runtime.files import remote
from finetune.runtime.files.remote import RemoteFolder


@pytest.fixture(params=["memory", "s3"])
def url(request):
    root = "memory:/" if request.param == "memory" else request.getfixturevalue("bucket")
    return f"{root}/remote/{request.node.originalname}"


@pytest.fixture
def folder(url):
    place = RemoteFolder(url)
    yield place
    place.delete(place.sizes())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"twelve bytes")
    return path


def test_a_missing_remote_folder_has_no_files(folder):
    assert folder.sizes() == {}
    assert folder.read("manifest.json") is None


def test_files_are_listed_with_their_sizes_by_their_names_in_the_folder(folder, file, url):
    folder.upload(file, "checkpoints/step-000001/model/0")
    folder.upload(file, "status.json")
    RemoteFolder(f"{url}-of-another").upload(file, "status.json")
    assert folder.sizes() == {"checkpoints/step-000001/model/0": 12, "status.json": 12}
    assert RemoteFolder(f"{url}/").sizes() == folder.sizes()


def test_uploaded_files_can_be_downloaded_and_replaced(folder, file, tmp_path):
    folder.upload(file, "a/b")
    folder.download("a/b", tmp_path / "back" / "b")
    assert (tmp_path / "back" / "b").read_bytes() == b"twelve bytes"
    file.write_bytes(b"other")
    folder.upload(file, "a/b")
    assert folder.read("a/b") == b"other"


def test_deleting_a_remote_file_skips_missing_ones(folder, file):
    folder.upload(file, "a")
    folder.upload(file, "b")
    folder.delete(["a", "never-there"])
    assert folder.sizes() == {"b": 12}


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setitem(remote.STORAGE_PACKAGES, "s3", ("no_such_s3fs", "s3"))
    with pytest.raises(MissingPackage, match=r"run.folder at s3:// needs .*pip install 'finetune-accelerate\[s3\]'"):
        RemoteFolder("s3://bucket/runs/first")
