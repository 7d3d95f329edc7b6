"""The small job of the tests, written in Python."""

import random
from pathlib import Path
from typing import Any

import yaml

from tests.small_job import JOB, reversal


def rows(count: int = 50, *, seed: int = 1) -> list[dict[str, object]]:
    """Return rows that ask for words in reverse."""
    chance = random.Random(seed)
    return [reversal(chance) for _ in range(count)]


def sections(folder: Path, **others: Any) -> dict[str, Any]:
    """Return the sections of a job of four steps into the folder; `others` replace some."""
    job = yaml.safe_load(JOB)
    job["run"] = {"folder": str(folder / "run"), "seed": 7}
    job["data"] |= {"train": rows(), "validation": rows(7, seed=2), "cache_folder": str(folder / "cache")}
    job["train"] = {"global_batch_size": 8, "microbatch_size": 4, "steps": 4, "learning_rate": 1e-2}
    job["checkpoint"] = job["evaluate"] = {"every_steps": 2}
    return {**job, **others}
