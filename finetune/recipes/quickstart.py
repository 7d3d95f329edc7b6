"""The quickstart's data: instructions about short lists of words, made from a seed, no list ever used twice."""

import json
import random
from collections.abc import Callable, Mapping, Sequence

NUM_TRAIN_ROWS = 4000
NUM_HELD_OUT_ROWS = 200
SEED = 1

WORDS = (
    "apple bread chair cloud door eagle field glass green house island juice kettle lemon light mango moon night "
    "ocean paper piano plant queen river rose salt ship snow star stone sugar table tiger train tree violin water "
    "wheel wind yellow"
)
NUM_WORDS = (3, 4)  # in a row

Skill = Callable[[Sequence[str]], Sequence[str]]

SKILLS: Mapping[str, Skill] = {
    "Repeat these words": lambda words: words,
    "Reverse these words": lambda words: words[::-1],
    "Shout these words": lambda words: [word.upper() for word in words],
    "Give the first word": lambda words: words[:1],
    "Give the last word": lambda words: words[-1:],
    "Leave out the first word": lambda words: words[1:],
    "Leave out the last word": lambda words: words[:-1],
}

Row = dict[str, list[dict[str, str]]]


def quickstart_files(*, seed: int = SEED) -> dict[str, str]:
    """Return `train.jsonl` and `held_out.jsonl` as texts; the seed decides every byte."""
    rows = instruction_rows(NUM_TRAIN_ROWS + NUM_HELD_OUT_ROWS, seed=seed)
    parts = {"train.jsonl": rows[:NUM_TRAIN_ROWS], "held_out.jsonl": rows[NUM_TRAIN_ROWS:]}
    return {name: "".join(json.dumps(row) + "\n" for row in part) for name, part in parts.items()}


def instruction_rows(num_rows: int, *, seed: int) -> list[Row]:
    """Return rows in `messages` format, each about a list of words that no other row has; the skills take turns."""
    source = random.Random(seed)
    asked, words_known = list(SKILLS), WORDS.split()
    rows: list[Row] = []
    seen: set[tuple[str, ...]] = set()
    while len(rows) < num_rows:
        words = tuple(source.sample(words_known, source.choice(NUM_WORDS)))
        if words in seen:
            continue
        seen.add(words)
        rows.append(_row(asked[len(rows) % len(asked)], words))
    return rows


def _row(instruction: str, words: Sequence[str]) -> Row:
    question = f"{instruction}: {' '.join(words)}"
    answer = " ".join(SKILLS[instruction](words))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
