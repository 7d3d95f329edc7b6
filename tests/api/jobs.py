"""The small job of the tests, written in Python."""

import random
from pathlib import Path
from typing import Any

from tests.small_job import reversal

MODEL = {
    "from_config": {
        "model_type": "llama",
        "values": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    },
    "tokenizer": {"train": {"vocabulary_size": 320}},
}


def rows(count: int = 50, *, seed: int = 1) -> list[dict[str, object]]:
    """Return rows that ask for words in reverse."""
    chance = random.Random(seed)
    return [reversal(chance) for _ in range(count)]


def sections(folder: Path, **others: Any) -> dict[str, Any]:
    """Return the sections of a job of four steps into the folder; `others` replace some."""
    return {
        "run": {"folder": str(folder / "run"), "seed": 7},
        "model": MODEL,
        "data": {
            "train": rows(),
            "validation": rows(7, seed=2),
            "max_length": 128,
            "chat_template": "chatml",
            "cache_folder": str(folder / "cache"),
        },
        "task": {"name": "sft"},
        "train": {"global_batch_size": 8, "microbatch_size": 4, "steps": 4, "learning_rate": 1e-2},
        "checkpoint": {"every_steps": 2},
        "evaluate": {"every_steps": 2},
        "report": {"console": "plain", "log_every_steps": 1},
        "export": {"verify": False},
        **others,
    }
