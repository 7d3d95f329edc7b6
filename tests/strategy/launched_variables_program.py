"""Started by a launcher: writes its environment to a file. `--here FILES` does so for `--accelerate` with each file."""

import json
import os
import sys
from pathlib import Path


def variables_of_files(files: list[str]) -> dict[str, dict[str, str]]:
    from finetune.strategy.launch_file import use_launch_file  # only here: the ranks of a launcher need none of it

    before, found = dict(os.environ), {}
    for file in files:
        ranks = {} if Path(file).stem == "single" else {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(ranks | ({"WORLD_SIZE": "2"} if ranks else {}))
        use_launch_file(Path(file))
        found[file] = dict(os.environ)
        os.environ.clear()
        os.environ.update(before)
    return found


if __name__ == "__main__":
    output, *words = sys.argv[1:]
    if words[:1] == ["--here"]:
        Path(output).write_text(json.dumps(variables_of_files(words[1:])))
    elif os.environ.get("RANK", "0") == "0":
        Path(output).write_text(json.dumps(dict(os.environ)))
