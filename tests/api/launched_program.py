"""A script of a user under `accelerate launch`: two trainings, an error, an evaluation and answers in one process."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

import finetune
from tests.api.jobs import sections


def main(folder: Path) -> None:
    """Write what this rank has seen to `rank-N.json` in the folder."""
    job = finetune.Job(**sections(folder))
    before = dict(os.environ)
    other = {"run.folder": str(folder / "other"), "train.precision": "bf16", "model.lora": {"rank": 4}}
    first = finetune.train(job, overrides=other)
    second = finetune.train(job)
    has_group, is_environment_unchanged = torch.distributed.is_initialized(), dict(os.environ) == before
    try:
        finetune.train(job, overrides={"run.folder": str(folder / "bad"), "model.from_config.values.hidden_size": 33})
        error = ""
    except finetune.FinetuneError as raised:
        error = f"{type(raised).__name__}: {raised}"
    assert second.final is not None
    seen = {
        "reasons": [first.reason, second.reason],
        "metrics": dict(second.metrics),
        "digest": hashlib.sha256((second.final / "model.safetensors").read_bytes()).hexdigest(),
        "has_group": has_group,
        "is_environment_unchanged": is_environment_unchanged,
        "error": error,
        "evaluated": finetune.evaluate(second.folder),
        "answers": finetune.generate(second.final, ["reverse: red", "reverse: green blue"], max_new_tokens=4),
    }
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
