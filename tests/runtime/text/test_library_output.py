import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

STORY = """
import logging, os, warnings
import transformers
from finetune.runtime.text.library_output import quiet_libraries
quiet_libraries(is_main={is_main})
logging.getLogger("transformers.models").warning("a warning of a library")
warnings.warn("a warning of Python")
logging.getLogger("transformers.models").error("an error of a library")
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # as it does when it is imported
logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU. If you have GPU ...")
logging.getLogger("DeepSpeed").warning("a warning of DeepSpeed")
print("bars", transformers.utils.logging.is_progress_bar_enabled(), os.environ.get("HF_DATASETS_DISABLE_PROGRESS_BARS"))
"""


def said(*, is_main: bool) -> str:
    """Return the output of a process after quiet_libraries, in its own interpreter since logging is global."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", STORY.format(is_main=is_main)],
        capture_output=True, text=True, check=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_the_main_rank_keeps_warnings_and_has_no_bars_in_a_log_file():
    told = said(is_main=True)
    assert "a warning of a library" in told and "a warning of Python" in told and "bars False 1" in told
    assert "a warning of DeepSpeed" in told and "Setting accelerator" not in told


def test_other_ranks_keep_only_errors():
    told = said(is_main=False)
    assert "a warning" not in told and "an error of a library" in told and "bars False 1" in told
