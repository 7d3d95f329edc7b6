"""The use of an old name of a key is one line."""

import subprocess
import sys
from pathlib import Path

from tests.small_job import JOB, write_job

ROOT = Path(__file__).parents[2]


def test_the_command_line_prints_the_use_of_an_old_name_as_one_line(tmp_path):
    path = write_job(tmp_path, text=JOB.replace("  steps: 8", "  num_steps: 8"))
    program = (
        "from finetune.config.rules import versions\n"
        "versions.RENAMED_KEYS = (versions.RenamedKey('train.num_steps', 'train.steps', since='0.3'),)\n"
        "from finetune.cli.program import main\nmain()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "check", str(path)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning[renamed-key]: job.yaml line ")
    assert "train.num_steps: is now train.steps; the old name works until 0.5" in line
