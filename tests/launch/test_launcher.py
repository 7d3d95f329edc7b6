"""The launcher of a host ends without a traceback where its ranks have said why."""

import sys
from pathlib import Path

from tests import launching


def launch(*words: str) -> tuple[int, str]:
    module = "finetune.launch.launcher"
    found = launching.capture([sys.executable, "-m", module, *words], is_cold=True)
    return found.returncode, found.stderr


def test_failed_ranks_print_their_own_errors_and_set_the_exit_code(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import sys; sys.exit('the reason')")
    file = Path("accelerate_configs/ddp.yaml").absolute()
    options = ("--config_file", str(file), "--num_processes", "2", "--main_process_port", "0")
    code, errors = launch(*options, str(program))
    assert code == 1 and "the reason" in errors
    assert "ChildFailedError" not in errors and "Traceback" not in errors


def test_other_errors_keep_their_traceback() -> None:
    code, errors = launch("--config_file", "/nowhere.yaml", "x.py")
    assert code == 1 and "Traceback" in errors
