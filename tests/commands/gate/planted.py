"""Small fine-tuned models whose faults are known, of one base model that knows five instructions about words."""

import functools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

from finetune.recipes.quickstart import Row, instruction_rows
from tests.scenarios.trained import train_here
from tests.small_job import write_rows

NEW_SKILLS = ("Give the last word", "Leave out the last word")
"""What the base model has not seen, and runs are trained to do."""

JOB = """
run: {{folder: runs/first, seed: 3}}
model: {model}
data:
  train: {{path: train.jsonl}}
  validation: {{path: held_out.jsonl}}
  max_length: 64
  chat_template: chatml
  cache_folder: {cache}
task: {{name: sft}}
train: {{global_batch_size: 16, microbatch_size: 16, steps: {steps}, learning_rate: {rate}}}
evaluate: {{}}
report: {{console: plain}}
export: {{verify: false}}
"""

FROM_CONFIG = """
  from_config:
    model_type: llama
    values: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 4, max_position_embeddings: 128, initializer_range: 0.05, tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 480}}"""


def instructions(row: Row) -> str:
    return row["messages"][0]["content"].partition(":")[0]


def with_answers(rows: Iterable[Row], answers: Iterable[str]) -> list[Row]:
    """Return the questions of these rows with other answers."""
    return [
        {"messages": [row["messages"][0], {"role": "assistant", "content": answer}]}
        for row, answer in zip(rows, answers, strict=True)
    ]


class PlantedRuns:
    """Trains runs in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rows = instruction_rows(7_000, seed=5)
        new = [row for row in rows if instructions(row) in NEW_SKILLS]
        self.old = [row for row in rows if instructions(row) not in NEW_SKILLS]
        self.held_out, self.new = new[:100], new[100:]
        self.new_rows = folder / "new_rows.jsonl"
        write_rows(self.new_rows, self.new[1_400:])
        self.general = folder / "general.jsonl"
        write_rows(self.general, self.old[:40])

    def train(self, name: str, rows: Iterable[Row], *overrides: str, model: str, steps: int, rate: float) -> Path:
        job = self.folder / name
        job.mkdir()
        write_rows(job / "train.jsonl", rows)
        write_rows(job / "held_out.jsonl", self.held_out)
        text = JOB.format(model=model, cache=self.folder / "cache", steps=steps, rate=rate)
        (job / "job.yaml").write_text(text)
        train_here(job / "job.yaml", *overrides)
        return job / "runs" / "first"

    @functools.cached_property
    def base(self) -> Path:
        run = self.train("base", self.old[40:4_000], model=FROM_CONFIG, steps=500, rate=4e-3)
        return run / "final"

    @functools.cache  # noqa: B019  # as long as the tests run
    def run(self, name: str) -> Path:
        """Return the run of this name, a key of RUNS."""
        rows, steps, rate, overrides = RUNS[name](self)
        return self.train(name, rows, *overrides, model=f"{{name: {self.base}}}", steps=steps, rate=rate)


def good_rows(planted: PlantedRuns) -> list[Row]:
    """Return rows of the new instructions among rows of the old ones, which keeps these."""
    rows = [*planted.new[:700], *planted.old[4_000:4_700]]
    random.Random(1).shuffle(rows)
    return rows


def wrong_turns(rows: Iterable[Row]) -> list[Row]:
    """Return conversations in which the assistant asks, and the user answers."""
    return [
        {"messages": [{**row["messages"][1], "role": "user"}, {**row["messages"][0], "role": "assistant"}]}
        for row in rows
    ]


def shuffled_answers(rows: list[Row]) -> list[Row]:
    answers = [row["messages"][1]["content"] for row in rows]
    random.Random(2).shuffle(answers)
    return with_answers(rows, answers)


Plan = tuple[Iterable[Row], int, float, tuple[str, ...]]
"""Rows, steps, learning rate, overrides."""

RUNS: dict[str, Callable[[PlantedRuns], Plan]] = {
    "good": lambda planted: (good_rows(planted), 120, 2e-3, ()),
    "untrained": lambda planted: (good_rows(planted), 2, 1e-12, ()),
    "wrong turns": lambda planted: (wrong_turns(planted.new[:600]), 60, 2e-3, ()),
    "high rate": lambda planted: (good_rows(planted), 60, 2e-1, ()),
    "overfitted": lambda planted: (planted.new[:20], 120, 4e-3, ()),
    "leaked": lambda planted: (shuffled_answers(planted.held_out), 60, 2e-3, ()),
    "forgetful": lambda planted: (planted.new[:1_400], 120, 4e-3, ()),
    "tiny": lambda planted: (good_rows(planted), 2, 2e-5, ()),
    "adapter": lambda planted: (good_rows(planted), 60, 1e-2, ("model.lora={rank: 8, alpha: 16.0}",)),
}


def read_result(path: Path) -> dict:
    """Return the JSON file of the gate."""
    return json.loads(path.read_text())
