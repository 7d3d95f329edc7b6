"""Rows in object storage: a real S3 server on this machine, and fsspec's storage in memory."""

import gzip
import http.server
import io
import json
import threading
from functools import partial

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError

ROWS = [{"text": f"story {n}"} for n in range(6)]
LINES = [json.dumps(row).encode() + b"\n" for row in ROWS]


def opened(url, said=None, **keys):
    say = (said if said is not None else []).append
    return open_source(SourceSection(path=url, **keys), key="data.train", log=say)


def texts(source):
    return [source.format.read(raw)["text"] for raw in source.rows()]


def put(url, content):
    with fsspec.open(url, "wb") as file:
        file.write(content)


@pytest.fixture(params=["s3", "memory", "file"])
def folder(request, tmp_path):
    """Return the URL of a folder with three files of two rows each, two kinds and a README."""
    root = {"memory": f"memory://{tmp_path.name}", "file": f"file://{tmp_path}"}.get(request.param)
    root = root or f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[4:]), sink)
    put(f"{root}/rows/a.jsonl", b"".join(LINES[:2]))
    put(f"{root}/rows/b.jsonl.gz", gzip.compress(b"".join(LINES[2:4])))
    put(f"{root}/rows/README.md", b"Rows.")
    put(f"{root}/table.parquet", sink.getvalue())
    return root


def test_a_file_a_folder_and_a_glob_are_read(folder):
    said = []
    assert texts(opened(f"{folder}/table.parquet")) == ["story 4", "story 5"]
    assert texts(opened(f"{folder}/rows", said)) == ["story 0", "story 1", "story 2", "story 3"]
    assert said[0].endswith("/rows also has README.md, which is not read")
    assert texts(opened(f"{folder}/rows/*.gz")) == ["story 2", "story 3"]
    assert texts(opened(f"{folder}/rows/*.jsonl*", skip=1, take=2)) == ["story 1", "story 2"]


def test_the_identity_changes_with_the_content(folder):
    before = opened(f"{folder}/rows/a.jsonl")
    identities = [before.identity(), before.identity(reads_content=False)]
    again = opened(f"{folder}/rows/a.jsonl")
    assert [again.identity(), again.identity(reads_content=False)] == identities
    put(f"{folder}/rows/a.jsonl", b"".join(LINES[1:3]))
    after = opened(f"{folder}/rows/a.jsonl")
    assert after.identity() != identities[0]
    assert after.identity(reads_content=False) != identities[1]


def test_a_missing_remote_file_is_named(folder):
    for url in (f"{folder}/nothing.jsonl", f"{folder}/rows/*.csv"):
        with pytest.raises(DataError, match=r"(nothing\.jsonl|\*\.csv): there is no such file"):
            opened(url)
    put(f"{folder}/rows/c.csv", b"text\nd\n")
    with pytest.raises(DataError, match=r"/rows contains files of several formats \(1 .csv, 2 .jsonl\)"):
        opened(f"{folder}/rows")


def test_a_storage_without_credentials_is_reported(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("Unable to locate credentials")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(DataError, match=r"a.jsonl cannot be loaded: Unable to locate credentials. Check the URL, and"):
        opened("memory://private/a.jsonl")


def test_an_unknown_storage_protocol_is_named():
    with pytest.raises(DataError, match=r"s9://bucket/a.jsonl cannot be loaded: Protocol not known: s9"):
        opened("s9://bucket/a.jsonl")


def test_a_bad_file_is_named_with_its_url(folder):
    put(f"{folder}/bad.jsonl.gz", b"not gzip")
    with pytest.raises(DataError, match=r"://.*bad\.jsonl\.gz: cannot be read"):
        opened(f"{folder}/bad.jsonl.gz")


@pytest.fixture
def site(tmp_path):
    """The address of a web server with a file of rows."""
    (tmp_path / "rows.jsonl").write_bytes(b"".join(LINES))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_source_url_with_a_new_signature_has_the_same_identity(site):
    plain = opened(f"{site}/rows.jsonl")
    for signature in ("c0ffee", "deca[f]*?"):
        signed = opened(f"{site}/rows.jsonl?X-Amz-Date={signature}&X-Amz-Signature={signature}")
        assert texts(signed) == texts(plain) == [row["text"] for row in ROWS]
        assert signed.identity() == plain.identity()
        assert signed.identity(reads_content=False) == plain.identity(reads_content=False)
        assert (
            {raw.origin for raw in signed.rows()} == {shard.name for shard in signed.shards()} == {f"{site}/rows.jsonl"}
        )


def test_an_address_that_was_written_down_without_its_secret_is_refused():
    with pytest.raises(DataError, match=r"the secret in this URL was removed .* Pass the URL again"):
        opened("https://h/rows.jsonl?sig=[redacted]")
