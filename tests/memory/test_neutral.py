"""A run whose longest batch was tried is bitwise the run in which it was not."""

import random
from pathlib import Path

import pytest

from tests.small_job import JOB, WORDS, conversation, write_rows
from tests.task_cases.case import Case
from tests.task_cases.runs import Left, launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

SHORT = (
    "data.validation=null",
    "evaluate=null",
    "data.batching.padding_free=false",
    "train.global_batch_size=12",
    "train.microbatch_size=2",
    "train.steps=4",
    "train.embedding_noise=5.0",
    "checkpoint.every_steps=2",
)
LORA = (*SHORT, "model.lora={rank: 4, alpha: 8.0, dropout: 0.3}")
NEVER, ALWAYS = "train.try_longest_batch=never", "train.try_longest_batch=always"
VARIANTS = {"full": SHORT, "lora": LORA, "one-microbatch": (*SHORT, "train.microbatch_size=4")}


def write_rows_of_many_lengths(folder: Path) -> None:
    chance = random.Random(3)
    rows = [chance.choices(WORDS, k=chance.choice((2, 3, 5, 20))) for _ in range(60)]
    write_rows(folder / "train.jsonl", (conversation(" ".join(row), row[0]) for row in rows))


def unmeasured(*_: Path) -> float:
    raise NotImplementedError


@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("single", "zero2", "zero3"))]
)
def test_a_tried_batch_changes_nothing(tmp_path, strategy):
    cut = Left(tmp_path / "cut")
    resumed = (*LORA, ALWAYS, f"run.folder={cut.folder}")
    variants = {
        **{f"{name}-never": (*overrides, NEVER) for name, overrides in VARIANTS.items()},
        **{f"{name}-always": (*overrides, ALWAYS) for name, overrides in VARIANTS.items()},
        "first-half": (*resumed, "train.stop_after_steps=2"),
        "second-half": resumed,
    }
    case = Case("neutral", JOB, write_rows_of_many_lengths, "", unmeasured, variants)
    prepare([case], tmp_path)
    runs = [(case, variant) for variant in variants]
    left = launch(None if strategy == "single" else strategy, runs, tmp_path, name=strategy, processes=3)
    log = (tmp_path / f"{strategy}.log").read_text()
    assert log.count("longest batch: ") == len(VARIANTS) + 2
    assert "the longest of 5" in log or "the longest of 4" in log
    for name in VARIANTS:
        without, tried = left["neutral", f"{name}-never"], left["neutral", f"{name}-always"]
        assert (without.error, tried.error) == (None, None)
        assert len(tried.steps) == 4
        assert tried.steps == without.steps
        assert tried.checkpoint_digests
        assert tried.checkpoint_digests == without.checkpoint_digests
    assert cut.checkpoint_digests == left["neutral", "lora-never"].checkpoint_digests
