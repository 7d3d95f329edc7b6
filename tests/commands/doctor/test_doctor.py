"""Faults set up on this machine are reported with their fixes. All but the GPUs are real."""

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from finetune.commands.doctor import gpus
from finetune.commands.doctor.doctor import examine, time_limit
from finetune.runtime.processes import free_loopback_port
from tests.commands.doctor.recorded import FOLDER
from tests.commands.doctor.test_facts import FakeNvml, program, write_job
from tests.launching import accelerate_command, begin, run

Sabotage = Callable[[Path, pytest.MonkeyPatch], Path | None]


def leave_a_lock(folder, patch):
    patch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    patch.setattr("finetune.runtime.upstream.torch_waits_for_locks", lambda: True)  # torch 2.14 does not
    (folder / "lock").touch()


def name_a_model_that_is_not_cached(folder, patch):
    patch.setenv("HF_HUB_OFFLINE", "1")
    return write_job(folder)


def put_in_two_cards(folder, patch):
    """Two cards with memory errors, and an `nvidia-smi` that prints their matrix."""
    patch.setattr(gpus, "pynvml", FakeNvml())
    program(folder, f"/bin/cat {FOLDER / 'a10_two_sockets.topo.txt'}")
    patch.setenv("PATH", str(folder), prepend=":")


SABOTAGED: tuple[tuple[Sabotage, str, str, str], ...] = (
    (leave_a_lock, "build-lock", "must_fix", "rm "),
    (name_a_model_that_is_not_cached, "not-cached", "must_fix", "hf download nobody/has-this-model"),
    (put_in_two_cards, "ecc", "should_fix", "--gpu-reset -i 1"),
)


@pytest.mark.parametrize(
    ("sabotage", "key", "severity", "fix"), SABOTAGED, ids=[case[0].__name__ for case in SABOTAGED]
)
def test_each_fault_of_a_machine_is_reported_with_its_fix(tmp_path, monkeypatch, capsys, sabotage, key, severity, fix):
    job = sabotage(tmp_path, monkeypatch)
    code = examine(job, [], as_json=True)
    findings = {finding["key"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert findings[key]["severity"] == severity and fix in findings[key]["fix"], findings[key]
    assert code == int(any(finding["severity"] == "must_fix" for finding in findings.values()))


def test_the_report_describes_the_machine_and_prints_reason_and_fix_of_a_finding(tmp_path, monkeypatch, capsys):
    leave_a_lock(tmp_path, monkeypatch)
    assert examine(None, []) == 1
    printed = capsys.readouterr().out
    assert "torch 2." in printed and "usable of" in printed
    lines = printed.splitlines()
    finding = f"FIX: no process of this machine holds {tmp_path}/lock"
    start = next(number for number, line in enumerate(lines) if line.startswith(finding))
    assert lines[start + 1].startswith("    why: ") and lines[start + 2].startswith(f"    fix: rm {tmp_path}/lock")


pytestmark = pytest.mark.distributed


@pytest.mark.full
def test_all_reduces_of_gloo_ranks_are_measured_and_printed_once(tmp_path):
    command = accelerate_command("ddp", "-m", "finetune", "doctor", processes=2)
    code = run(command, log=tmp_path / "log", timeout_seconds=240, environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed
    assert printed.count("all-reduce over 2 ranks on 1 host, gloo") == 1
    rows = re.findall(r"^ *([\d.]+ [kM]B) +[\d.]+ ms +([\d.]+ [kMG]?B/s) +[\d.]+ [kMG]?B/s$", printed, re.MULTILINE)
    assert [size for size, _ in rows] == ["4.1 kB", "65.5 kB", "1.0 MB", "16.8 MB"]


@pytest.mark.full
def test_ranks_exit_with_a_message_when_one_never_starts(tmp_path):
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_loopback_port()),
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
    }
    command = [sys.executable, "-m", "finetune", "doctor", "--wait", "15"]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        ranks = [
            begin(command, output=file, environment={**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, file in enumerate(files)
        ]
        for process in ranks:
            stack.callback(process.end)
        codes = [process.wait(timeout=120) for process in ranks]
        printed = [os.pread(file.fileno(), 1 << 16, 0).decode() for file in files]
    assert codes == [1, 1]
    assert all("has not met the other ranks within 15 s" in each for each in printed), printed
    assert "Traceback" not in "".join(printed)


def test_the_time_limit_calls_back_only_when_the_block_is_late():
    late = []
    with time_limit(60.0, on_late=lambda: late.append("early")):
        pass
    with time_limit(0.0, on_late=lambda: late.append("late")):
        while not late:
            pass
    assert late == ["late"]
