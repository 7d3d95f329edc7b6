"""A run folder has one writer, and the kernel lets go of it when that one dies."""

import os
import subprocess
import sys

import pytest

from finetune.errors import UserError
from finetune.runtime.claim import claimed

HOLDER = """
import os, sys
from pathlib import Path
from finetune.runtime.claim import claimed
with claimed(Path(sys.argv[1]), say=print):
    child = os.fork()  # as a data loader's process: it outlives its parent and must not keep the folder
    if child == 0:
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_with_who_holds_the_folder_until_that_one_dies(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        with (
            pytest.raises(UserError, match=rf"is being written by process {holder.pid} on .*, since 20"),
            claimed(tmp_path / "run", say=print),
        ):
            pass
        holder.kill()
        holder.wait()
        with claimed(tmp_path / "run", say=print):
            assert str(os.getpid()) in (tmp_path / "run" / ".writer.lock").read_text()
