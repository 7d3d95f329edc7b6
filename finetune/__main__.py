"""`finetune` and `python -m finetune`: the words typed go to the command line."""

from finetune.cli.program import main

if __name__ == "__main__":
    main()
