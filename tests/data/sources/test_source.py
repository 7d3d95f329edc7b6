"""The sources of a job: what is read of each file, mixes, splits, and what is kept apart."""

import json
import pickle

import pytest

from finetune.config.sections.data import (
    DataSection,
    MixedSourceSection,
    SourceSection,
    TrainingSourceSection,
    ValidationSourceSection,
)
from finetune.data.sources.source import open_source, open_sources, texts
from finetune.errors import DataError
from tests.refusals import refused

ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(1, 6)]
KEY = "data.train"


def opened(section, log=lambda _: None):
    return open_source(section, key=KEY, log=log)


def read(section, said=None):
    source = opened(section, (said if said is not None else []).append)
    return [source.format.read(raw) for raw in source.rows()]


def test_the_digest_is_of_content_and_not_of_names(tmp_path, write_rows):
    first = opened(write_rows(ROWS, name="a.jsonl")).identity()
    assert opened(write_rows(ROWS, name="b.jsonl")).identity() == first
    assert opened(write_rows(ROWS[:4], name="b.jsonl")).identity() != first


def test_a_place_that_cannot_be_read_is_named_with_its_key(tmp_path):
    for path in (f"{tmp_path}/nothing.jsonl", f"memory://{tmp_path.name}/nothing.jsonl"):
        with refused(DataError, "data.train.path", "nothing.jsonl"):
            opened(SourceSection(path=path))


def test_skipping_every_row_is_an_error(write_rows):
    with refused(DataError):
        read(write_rows(ROWS, skip=5))


def test_skip_and_take_go_through_files_and_shards_from_any_row_on(tmp_path, write_rows):
    for name, rows in (("a", ROWS[:2]), ("b", ROWS[2:3]), ("c", ROWS[3:])):
        write_rows(rows, name=f"{name}.jsonl")
    for skip in range(5):
        for take in (1, 2, 5, None):
            source = opened(SourceSection(path=str(tmp_path / "*.jsonl"), skip=skip, take=take))
            meant = ROWS[skip:][:take]
            assert [raw.parse() for raw in source.rows()] == meant
            assert [raw.parse() for shard in source.shards() for raw in shard.rows()] == meant
            last = source.shards()[-1]
            assert [raw.parse() for raw in last.rows(1)] == [raw.parse() for raw in last.rows()][1:]


def test_the_texts_of_a_conversation_are_its_message_contents(write_rows):
    call = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [{"name": "f"}]}
    mixed = [{"role": "user", "content": "Hi."}, call, {"role": "assistant", "content": "Ho."}]
    pair = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
    sources = [opened(write_rows([row], name=f"{n}.jsonl")) for n, row in enumerate([{"messages": mixed}, pair])]
    assert list(texts(sources)) == ["Hi.", "Hm.", "Ho.", "Why?", "So.", "No."]


def stories(numbers):
    return [{"text": f"story {n}"} for n in numbers]


def told(source):
    return [source.format.read(raw)["text"] for raw in source.rows()]


def open_job(train, said=None, *, seed=7, **validation):
    section = DataSection(train=train, validation=ValidationSourceSection(**validation), max_length=8)
    return open_sources(section, seed=seed, log=(said if said is not None else []).append)


@pytest.fixture
def mixed(write_rows):
    """Return two sources in different formats."""
    a = write_rows(stories(range(100)), name="a.jsonl")
    turns = [[{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "42"}] for n in range(50)]
    b = write_rows([{"conversations": each} for each in turns], name="b.jsonl")
    parts = (MixedSourceSection(path=a.path, weight=1.0), MixedSourceSection(path=b.path, weight=2.0, skip=10))
    return TrainingSourceSection(mix=parts)


def test_a_mix_is_a_source_for_every_part(mixed):
    said = []
    job = open_sources(DataSection(train=mixed, max_length=8), seed=1, log=said.append)
    assert [source.key for source in job.train] == ["data.train.mix.0", "data.train.mix.1"]
    assert [len(list(source.rows())) for source in job.train] == [100, 40]
    assert job.train[1].section.weight == 2.0
    assert job.validation is None
    assert said[1].startswith("data.train.mix.1.format is not set: the columns `conversations`")


@pytest.mark.parametrize("keys", [{"fraction": 0.2}, {"hash_fraction": 0.2}])
def test_a_split_takes_its_share_of_every_part_and_leaves_the_rest(mixed, keys):
    job = open_job(mixed, **keys)
    kept = [json.dumps(source.format.read(raw)) for source in job.train for raw in source.rows()]
    held_out = [json.dumps(job.validation.format.read(raw)) for raw in job.validation.rows()]
    assert len(kept) + len(held_out) == 140
    assert not set(kept) & set(held_out)
    assert 14 <= len(held_out) <= 42  # 28 are meant; three standard deviations are 14
    assert {"text", "messages"} == {name for row in held_out for name in json.loads(row)}
    assert job.validation.key == "data.validation"


def test_a_fraction_is_drawn_from_the_seed_alone(write_rows):
    train = write_rows(stories(range(200)))
    once, again, other = (told(open_job(train, seed=seed, fraction=0.1).validation) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.parametrize(
    ("num_rows", "fraction", "num_held_out"),
    [(2, 0.001, 1), (2, 0.999, 1), (10, 0.05, 1), (60, 0.05, 3), (97, 0.1, 10), (200, 0.5, 100)],
)
def test_a_fraction_is_an_exact_count_at_least_one_and_never_all(write_rows, num_rows, fraction, num_held_out):
    for seed in range(5):
        job = open_job(write_rows(stories(range(num_rows))), seed=seed, fraction=fraction)
        held_out = told(job.validation)
        assert len(held_out) == num_held_out
        assert sorted([*held_out, *told(job.train[0])]) == sorted(row["text"] for row in stories(range(num_rows)))


def test_a_fraction_is_counted_between_skip_and_take_and_over_all_files(write_rows, tmp_path):
    for number in range(4):
        write_rows(stories(range(25 * number, 25 * number + 25)), name=f"part-{number}.jsonl")
    for skip, take, num_held_out in ((0, None, 10), (30, None, 7), (0, 60, 6), (20, 40, 4)):
        job = open_job(TrainingSourceSection(path=str(tmp_path), skip=skip, take=take), fraction=0.1)
        held_out, kept = told(job.validation), told(job.train[0])
        assert len(held_out) == num_held_out
        assert len(held_out) + len(kept) == (take or 100 - skip)
        assert not set(held_out) & set(kept)


def test_a_row_leaves_the_held_out_rows_only_for_an_appended_one(write_rows):
    for num_added in (1, 20, 100):
        for seed in range(5):
            before = told(open_job(write_rows(stories(range(100))), seed=seed, fraction=0.1).validation)
            after = told(open_job(write_rows(stories(range(100 + num_added))), seed=seed, fraction=0.1).validation)
            stayed = [row for row in after if int(row[6:]) < 100]
            grown_by, num_new = len(after) - len(before), len(after) - len(stayed)
            assert len(set(before) - set(stayed)) == max(0, num_new - grown_by)
            assert len(set(stayed) - set(before)) == max(0, grown_by - num_new)


def test_a_fraction_of_a_single_row_is_refused(write_rows):
    with refused(DataError, "data.validation.fraction"):
        open_job(write_rows(stories(range(1))), fraction=0.5)


def test_a_hash_fraction_of_few_rows_holds_out_one_and_never_all(write_rows):
    job = open_job(write_rows(stories(range(5))), hash_fraction=0.001)
    (held_out,) = told(job.validation)
    assert sorted([held_out, *told(job.train[0])]) == sorted(f"story {number}" for number in range(5))
    assert told(open_job(write_rows(stories(range(5))), hash_fraction=0.001).validation) == [held_out]
    with refused(DataError, "data.validation"):
        open_job(write_rows(stories(range(5))), hash_fraction=0.999)


def test_a_hash_fraction_keeps_equal_rows_together_and_is_stable_as_rows_are_added(write_rows):
    before = set(told(open_job(write_rows(stories(range(100))), hash_fraction=0.3).validation))
    job = open_job(write_rows(stories([*range(50, 150), *range(150)])), hash_fraction=0.3)
    after = set(told(job.validation))
    assert before == {row for row in after if int(row[6:]) < 100}
    assert not after & set(told(job.train[0]))


def test_training_rows_that_are_evaluated_on_are_left_out_and_counted(write_rows):
    train = write_rows([{**row, "id": n} for n, row in enumerate(stories([*range(10), *range(10)]))])
    validation = write_rows(stories([3, 4, 99]), name="dev.jsonl")
    job = open_job(train, path=validation.path, exclude_from_train=True)
    assert told(job.train[0]) == [row["text"] for row in stories([*range(3), *range(5, 10)])] * 2
    assert job.train[0].num_left_out == 4
    told(job.train[0])
    assert job.train[0].num_left_out == 4  # each pass counts for itself


def test_a_validation_fraction_can_exclude_rows_of_equal_content_from_training(write_rows):
    job = open_job(write_rows(stories([*range(100)] * 2)), fraction=0.1, exclude_from_train=True)
    evaluated = set(told(job.validation))
    assert len(evaluated) > 5
    assert not evaluated & set(told(job.train[0]))


def identity(train, **validation):
    return json.dumps(open_job(train, **validation).train[0].identity())


def test_every_setting_that_selects_rows_is_part_of_the_source_identity(write_rows):
    train, dev = write_rows(stories(range(20))), write_rows(stories([3]), name="dev.jsonl")
    other_dev = write_rows(stories([4]), name="other.jsonl")
    found = [
        identity(train, path=dev.path),
        identity(train, path=dev.path, exclude_from_train=True),
        identity(train, path=other_dev.path, exclude_from_train=True),
        identity(train, fraction=0.2),
        identity(train, fraction=0.3),
        identity(train, fraction=0.2, seed=8),
        identity(train, hash_fraction=0.2),
        identity(train.model_copy(update={"skip": 1}), path=dev.path),
        identity(train.model_copy(update={"take": 19}), path=dev.path),
        identity(train.model_copy(update={"template": {"text": "{{ text }}!"}}), path=dev.path),
    ]
    assert len(set(found)) == len(found)
    assert identity(train, path=other_dev.path) == found[0]  # without exclusion, what is evaluated on decides nothing
    job = open_job(train, fraction=0.2)
    assert job.validation.identity() != job.train[0].identity()


def test_shards_of_a_split_can_be_sent_to_another_process(write_rows):
    job = open_job(write_rows(stories(range(30))), hash_fraction=0.2, exclude_from_train=False)
    (shard,) = job.train[0].shards()
    sent = pickle.loads(pickle.dumps(shard))
    assert [raw.number for raw in sent.rows(3)] == [raw.number for raw in job.train[0].rows()][3:]
