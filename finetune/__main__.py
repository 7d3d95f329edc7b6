"""`finetune` and `python -m finetune`: the words typed go to the command line; options alone mean `train`."""

import sys

from finetune.cli import streams_and_signals
from finetune.runtime.optional import lazily

with lazily():  # Ctrl-C and closed streams are provided for before anything slow is imported
    from finetune.cli import app as command_line
    from finetune.cli import exit_codes

NOT_TRAIN = ("--help", "--version")


def main() -> None:
    """Run the command that was typed; `--config JOB.yaml` without a command trains."""
    streams_and_signals.open_missing_streams()
    streams_and_signals.exit_on_interrupt()
    words = sys.argv[1:]
    if words and words[0].startswith("--") and words[0] not in NOT_TRAIN:
        words = ["train", *words]
    with exit_codes.guarded_command_line():
        app = command_line.app
        with streams_and_signals.raised_interrupts():
            app(words)


if __name__ == "__main__":
    main()
