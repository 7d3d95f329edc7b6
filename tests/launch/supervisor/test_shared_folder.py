"""What supervisors read of one another: whole files, and only hosts that are seen to be alive."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.launch.supervisor.members import Attempt, Beat
from finetune.launch.supervisor.shared_folder import ATTEMPT_FILE, NameCheck, SharedFolder

HOST = Beat("a", "10.0.0.1", 1, 2, count=1, reaches=("b",), session="s")
ATTEMPT = Attempt(1, ("a",), ("10.0.0.1",), 2, "starts", sessions=("s",))


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
    folder.remove_beat(Beat("a", "10.0.0.1", 1, 2, 1, session="of a supervisor that was replaced"))
    assert list(folder.alive()) == ["a"]
    folder.remove_beat(Beat("a", "10.0.0.1", 1, 2, 2))
    folder.remove_beat(Beat("a", "10.0.0.1", 1, 2, 2))
    assert folder.alive() == {}


def test_time_during_which_this_host_was_suspended_does_not_count_as_silence_of_others(tmp_path: Path) -> None:
    folder, clock = make_folder(tmp_path)
    for count in (1, 2):
        folder.write_beat(Beat("a", "10.0.0.1", 1, 2, count))
        folder.alive()
    clock.now = 100.0
    folder.skip(98.0)
    assert list(folder.alive()) == ["a"]
    clock.now = 108.0
    assert folder.alive() == {}


def test_files_that_are_damaged_or_of_others_are_left_out(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    (tmp_path / "host-x.json").write_text("{")
    (tmp_path / "host-y.json").write_text('{"name": "y", "color": "red", "reaches": []}')
    (tmp_path / "host-z.json").write_text("[]")
    assert folder.alive() == {}
    for text in ("", "[]", '{"hosts": 3}'):
        (tmp_path / "attempt-000004.json").write_text(text)
        assert folder.read_attempt() is None and folder.last_number() == 4


def test_an_attempt_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    assert folder.read_attempt() is None and folder.last_number() == 0
    assert folder.write_attempt(ATTEMPT)
    assert folder.read_attempt() == ATTEMPT and folder.last_number() == 1
    facts = json.loads((tmp_path / ATTEMPT_FILE).read_text())
    assert (facts["number"], facts["hosts"], facts["reason"]) == (1, ["a"], "starts")


def test_only_one_host_creates_the_attempt_of_a_number(tmp_path: Path) -> None:
    first, second = make_folder(tmp_path)[0], make_folder(tmp_path)[0]
    other = replace(ATTEMPT, hosts=("b",), reason="a is lost")
    assert first.write_attempt(ATTEMPT) and not second.write_attempt(other)
    assert second.read_attempt() == ATTEMPT
    third = replace(other, number=2)
    assert second.write_attempt(third) and first.read_attempt() == third
    first.publish(ATTEMPT)  # as one that was suspended does
    first.publish(third)
    assert json.loads((tmp_path / ATTEMPT_FILE).read_text())["number"] == 2
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_file_system_without_hard_links_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    folder, _ = make_folder(tmp_path)
    assert folder.write_attempt(ATTEMPT) and not folder.write_attempt(ATTEMPT)
    assert folder.read_attempt() == ATTEMPT


def test_a_name_in_use_is_refused_and_a_name_that_was_left_over_is_not(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    assert NameCheck(folder, HOST).is_free()
    folder.write_beat(HOST)
    mine = replace(HOST, session="mine")
    left_over = NameCheck(folder, mine)
    assert [left_over.is_free() for _ in range(4)] == [False, False, False, True]
    in_use = NameCheck(folder, mine)
    assert not in_use.is_free()
    folder.write_beat(replace(HOST, count=2))
    with pytest.raises(UserError, match="--name a: another supervisor has this name"):
        in_use.is_free()


def test_a_supervisor_that_was_replaced_while_it_was_suspended_ends(tmp_path: Path) -> None:
    folder, _ = make_folder(tmp_path)
    check = NameCheck(folder, HOST)
    folder.write_beat(HOST)
    assert check.is_free()
    folder.write_beat(replace(HOST, session="new"))
    with pytest.raises(UserError, match="another supervisor"):
        check.is_free()
