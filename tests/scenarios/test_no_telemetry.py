"""A run on one process talks to nobody: Python connects no socket and looks up no name."""

import json
import sys
from pathlib import Path

import pytest

from tests import launching

ROOT = Path(__file__).parents[2]
AUDITED = """
import json, os, sys

def note(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        where = str(arguments[0] if event.startswith("socket.get") else arguments[1])
        descriptor = os.open(sys.argv[0] + ".jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, (json.dumps([event, where]) + chr(10)).encode())
        os.close(descriptor)

sys.addaudithook(note)
"""
PROGRAM = (
    AUDITED
    + """
output = sys.argv.pop(1)
sys.argv[0] = output
if sys.argv[1] == "connect":
    import socket
    socket.socket().connect_ex(("127.0.0.1", 9))
else:
    from finetune.cli.program import main
    main()
"""
)


PROBE = ["socket.bind", "('::1', 0)"]
"""When it is imported, urllib3 looks whether there is IPv6 by binding a port of this host, and closes it."""


@pytest.mark.parametrize("overrides", [[], ["report.trackers=[tensorboard]"]], ids=["plain", "tensorboard"])
@pytest.mark.distributed
@pytest.mark.full
def test_a_run_opens_no_connection(job, tmp_path, overrides):
    if overrides:
        pytest.importorskip("tensorboard")
    program = tmp_path / "audited.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(tmp_path / "seen"), "train", "--config", str(job)]
    for override in (f"run.folder={tmp_path / 'run'}", "train.steps=4", "checkpoint.every_steps=2", *overrides):
        words += ["--set", override]
    environment = {"PYTHONPATH": str(ROOT)}
    code = launching.run(
        words, log=tmp_path / "log", timeout_seconds=300, environment=environment, folder=tmp_path, is_cold=True
    )
    assert code == 0, (tmp_path / "log").read_text()
    assert (tmp_path / "run" / "final").is_dir()
    assert [event for event in opened(tmp_path) if event != PROBE] == []


def test_the_audit_sees_a_connection(tmp_path):
    program = tmp_path / "audited.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(tmp_path / "seen"), "connect"]
    assert launching.run(words, log=tmp_path / "log", timeout_seconds=60, is_cold=True) == 0
    assert [event for event, _ in opened(tmp_path)] == ["socket.connect"]


def opened(folder: Path) -> list[list[str]]:
    file = folder / "seen.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
