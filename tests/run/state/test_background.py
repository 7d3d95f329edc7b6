import time

import pytest

from finetune.config.load import load_config, with_local_folder
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.report.events import CheckpointSaved, Noted, Warned
from finetune.run.state import upload
from finetune.run.state.upload import BackgroundUploader, Uploader, make_uploader
from tests.run.state.staging import NotedRemote, checkpoint

SAVED = CheckpointSaved(4, "path", size_bytes=1, seconds=0.0, stall_seconds=0.0)


class Told(list):
    """A reporter that remembers."""

    def __call__(self, event):
        self.append(event)


def until(is_so):
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def remote(request):
    return NotedRemote(f"memory://mirror/{request.node.name}")


@pytest.fixture
def mirror(tmp_path, remote, monkeypatch):
    monkeypatch.setattr(upload, "_LAST_PAUSE_SECONDS", 0.0)
    return BackgroundUploader(tmp_path, remote, section=CheckpointSection())


def test_checkpoints_saved_during_the_run_are_uploaded_at_the_end(mirror, remote, tmp_path, capsys):
    told = Told()
    reporter = mirror.watch_reporter(told)
    with mirror:
        checkpoint(tmp_path, 4)
        reporter(SAVED)
    assert told == [SAVED]
    assert mirror.finish(143) == 143
    assert remote.checkpoints() == {"step-000004": ["manifest.json", "model/0", "progress.json"]}
    assert capsys.readouterr().out == f"everything is at {remote.url}\n"


def test_files_missing_from_the_storage_at_the_end_are_listed_with_their_local_folder(mirror, remote, tmp_path, capsys):
    checkpoint(tmp_path, 4)
    remote.failing["model/0"] = 1000
    with mirror:
        pass
    assert mirror.finish(0) == 1
    said = capsys.readouterr().err
    assert said.splitlines() == [
        f"error: {remote.url} lacks 1 of this run's files or folders",
        "  checkpoints/step-000004: ConnectionError: the line went dead",
        f"They are in {tmp_path}. Run the same command again: it uploads what is missing.",
    ]


def test_a_finished_run_uploads_files_missed_by_an_earlier_start(mirror, remote, tmp_path):
    checkpoint(tmp_path, 4)
    assert mirror.finish(0) == 0
    assert "step-000004" in remote.checkpoints()


def test_an_upload_failure_is_logged_with_the_next_event_and_no_error_if_a_retry_succeeds(mirror, remote, tmp_path):
    told = Told()
    checkpoint(tmp_path, 4)
    remote.failing["model/0"] = 1
    with mirror:
        until(lambda: mirror._warnings)
        mirror.watch_reporter(told)(Noted(5, "goes on"))
    assert told[0] == Noted(5, "goes on")
    assert isinstance(told[1], Warned) and "not uploaded, tried again at the next checkpoint" in told[1].message
    assert mirror.finish(0) == 0


def test_an_error_waits_for_the_uploads_a_short_time_and_passes(mirror, remote, tmp_path):
    checkpoint(tmp_path, 4)
    with pytest.raises(ZeroDivisionError), mirror:
        raise ZeroDivisionError
    assert "step-000004" in remote.checkpoints()


def test_only_rank_0_of_a_run_at_a_url_uploads(job, monkeypatch):
    here = with_local_folder(load_config(job))
    there = with_local_folder(load_config(job, ["run.folder=memory://runs/first"]))
    assert type(make_uploader(here)) is Uploader
    assert isinstance(make_uploader(there), BackgroundUploader)
    monkeypatch.setattr(upload.distributed, "is_main", lambda: False)
    assert type(make_uploader(there)) is Uploader
    reporter = Told()
    with Uploader() as nobody:
        assert nobody.watch_reporter(reporter) is reporter
    assert nobody.finish(3) == 3
