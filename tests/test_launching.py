"""A pytest that is killed leaves none of the processes that its tests have started."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

LAUNCHER = """
import subprocess

rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(rank.pid, flush=True)
rank.wait()
"""

TEST = """
import sys
from pathlib import Path
from tests import launching

with Path(sys.argv[1]).open("wb") as output:
    process = launching.begin([sys.executable, "-c", {launcher!r}], output=output, is_cold={is_cold})
    print(process.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_cold", [False, True])
def test_a_killed_pytest_leaves_no_process_of_its_tests(tmp_path: Path, is_cold: bool) -> None:
    words = [sys.executable, "-c", TEST.format(launcher=LAUNCHER, is_cold=is_cold)]
    with subprocess.Popen([*words, str(tmp_path / "log")], stdin=-1, stdout=-1, text=True) as killed:
        assert killed.stdout is not None
        started = psutil.Process(int(killed.stdout.readline()))
        while not (tmp_path / "log").read_text().endswith("\n"):
            assert started.is_running()
        rank = psutil.Process(int((tmp_path / "log").read_text()))
        killed.kill()
        gone, alive = psutil.wait_procs([started, rank], timeout=60)
    assert len(gone) == 2 and not alive
