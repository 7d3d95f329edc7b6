"""Launched ranks: what they measure, and what they do when one is missing."""

import os
import re
import sys
import tempfile
from contextlib import ExitStack

import pytest

from finetune.commands.doctor.subjects.rendezvous import time_limit
from finetune.runtime.processes import free_port
from tests.launching import accelerate_command, begin, run

pytestmark = pytest.mark.distributed


@pytest.mark.full
@pytest.mark.parametrize("processes", [2, 4])
def test_all_reduces_of_gloo_ranks_are_measured_and_printed_once(tmp_path, processes):
    command = accelerate_command("ddp", "-m", "finetune", "doctor", processes=processes)
    code = run(command, log=tmp_path / "log", timeout_seconds=240, environment={"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    printed = (tmp_path / "log").read_text()
    assert code == 0, printed
    assert printed.count(f"all-reduce over {processes} ranks on 1 host, gloo") == 1
    rows = re.findall(r"^ *([\d.]+ [kM]B) +[\d.]+ \w+ +([\d.]+ [kMG]?B/s) +[\d.]+ [kMG]?B/s$", printed, re.MULTILINE)
    assert [size for size, _ in rows] == ["4.1 kB", "65.5 kB", "1.0 MB", "16.8 MB"]
    pairs = re.findall(r"^ +(\d-\d) ", printed, re.MULTILINE)
    assert len(pairs) == (0 if processes == 2 else 6)
    assert [
        name for name in ("ddp", "zero1, zero2", "fsdp2, zero3") if not re.search(rf"{name} +[\d.]+ GB", printed)
    ] == []


@pytest.mark.full
def test_ranks_exit_with_a_message_when_one_never_starts(tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
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
    assert all("of 3 ranks, rank 2 did not arrive within 15 s" in each for each in printed), printed
    assert "Traceback" not in "".join(printed)


def test_the_time_limit_calls_back_only_when_the_block_is_late():
    late = []
    with time_limit(60.0, on_late=lambda: late.append("early")):
        pass
    with time_limit(0.0, on_late=lambda: late.append("late")):
        while not late:
            pass
    assert late == ["late"]
