"""The whole program, from the words typed to the exit code."""

import sys

from finetune.runtime.optional import lazily
from finetune.runtime.text import standard_streams

with lazily():  # Ctrl-C and closed streams are handled before anything slow is imported
    from finetune.cli import app as command_line
    from finetune.cli import exit_codes

NOT_TRAIN = ("--help", "--version")


def main() -> None:
    """Run the command that was typed; options alone, such as `--config JOB.yaml`, mean `train`."""
    standard_streams.open_missing_streams()
    standard_streams.exit_on_interrupt()
    words = sys.argv[1:]
    if words and words[0].startswith("--") and words[0] not in NOT_TRAIN:
        words = ["train", *words]
    with exit_codes.guarded_command_line():
        command_line.app(words)
