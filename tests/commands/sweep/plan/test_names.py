"""Names of runs are readable, safe as folders, and different for different values."""

import itertools

from finetune.commands.sweep.plan.names import run_name, short_keys

ODD = [
    *(
        "a/b/c.jsonl",
        "x/b/c.jsonl",
        "..",
        ".",
        "",
        "ü",
        "日本",
        "a b",
        "a-b",
        "A" * 500,
        "A" * 501,
        "4",
        4,
        4.5,
        "true",
    ),
    *(True, None, "null", [1, 2], [2, 1], ["1", "2"], {"rank": 4}, "x" * 41, "con,tent=1", "-x", "\n", "\u202e"),
]


def test_the_name_says_the_values():
    assert run_name({"train.learning_rate": 1e-4, "model.lora.rank": 8}) == "learning_rate=0.0001,rank=8"
    assert run_name({"data.train.path": "rows/short.jsonl"}).startswith("path=short.jsonl-")
    assert run_name({}) == "run"


def test_a_key_is_as_short_as_it_stays_clear():
    assert short_keys(["train.optimizer.name", "train.schedule.name"])["train.schedule.name"] == "schedule.name"
    assert short_keys(["name", "model.name"]) == {"name": "name", "model.name": "model.name"}


def test_odd_values_get_safe_and_different_names():
    names = [run_name({"model.name": value}) for value in ODD]
    assert len(set(names)) == len(ODD)
    for name in names:
        assert name.isascii() and name.isprintable() and len(name) <= 120 and not set(name) & set('/\\ :*?"<>|\n')


def test_many_long_values_stay_short_and_apart():
    keys = [f"section.key_number_{number}" for number in range(12)]
    points = [dict(zip(keys, values, strict=True)) for values in itertools.product("ab", repeat=12)][:300]
    names = {run_name(point) for point in points}
    assert len(names) == 300 and max(map(len, names)) <= 120


def test_a_name_that_is_taken_gets_a_digest_of_its_values():
    first = run_name({"a.b": 1})
    assert first != run_name({"a.b": 1.0}, taken={first})
