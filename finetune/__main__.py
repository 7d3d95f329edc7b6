"""`finetune` and `python -m finetune`: the words typed go to the command line; options alone mean `train`."""

import sys

from finetune.cli.app import app
from finetune.cli.exit_codes import guarded_command_line

NOT_TRAIN = ("--help", "--version")


def main() -> None:
    """Run the command that was typed; `--config JOB.yaml` without a command trains."""
    words = sys.argv[1:]
    if words and words[0].startswith("--") and words[0] not in NOT_TRAIN:
        words = ["train", *words]
    with guarded_command_line():
        app(words)


if __name__ == "__main__":
    main()
