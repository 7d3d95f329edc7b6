"""What supervisors read of one another: whole files, and only hosts that are seen to be alive."""

from pathlib import Path

from finetune.launch.supervisor.members import Attempt, Beat
from finetune.launch.supervisor.shared_folder import ATTEMPT_FILE, SharedFolder

HOST = Beat("a", "10.0.0.1", 1, 2, count=1, reaches=("b",))
ATTEMPT = Attempt(1, ("a",), ("10.0.0.1",), 2, "starts")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_folder(path: Path) -> tuple[SharedFolder, Clock]:
    clock = Clock()
    return SharedFolder(path, lost_after_seconds=10, clock=clock), clock


def test_a_host_is_alive_while_its_counter_grows(tmp_path: Path) -> None:
    folder, clock = make_folder(tmp_path)
    folder.write_beat(HOST)
    assert folder.alive() == {}  # it may be the file of a host that died yesterday
    second = Beat(**{**HOST.__dict__, "count": 2})
    folder.write_beat(second)
    assert folder.alive() == {"a": second}
    clock.now = 9.9
    assert folder.alive() == {"a": second}
    clock.now = 10.0
    assert folder.alive() == {}


def test_a_host_that_has_ended_is_gone_at_once(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    for count in (1, 2):
        folder.write_beat(Beat("a", "10.0.0.1", 1, 2, count))
        folder.alive()
    folder.remove_beat("a")
    folder.remove_beat("a")
    assert folder.alive() == {}


def test_files_that_are_damaged_or_of_others_are_left_out(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    (tmp_path / "host-x.json").write_text("{")
    (tmp_path / "host-y.json").write_text('{"name": "y", "color": "red", "reaches": []}')
    (tmp_path / "host-z.json").write_text("[]")
    assert folder.alive() == {}
    for text in ("", "[]", '{"hosts": 3}'):
        (tmp_path / ATTEMPT_FILE).write_text(text)
        assert folder.read_attempt() is None


def test_an_attempt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    assert folder.read_attempt() is None
    folder.write_attempt(ATTEMPT)
    assert folder.read_attempt() == ATTEMPT
    folder.forget_attempt(Attempt(2, ("a",), ("10.0.0.1",), 2, "newer"))
    assert folder.read_attempt() == ATTEMPT
    folder.forget_attempt(ATTEMPT)
    assert folder.read_attempt() is None
