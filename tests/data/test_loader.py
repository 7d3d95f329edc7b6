"""The loaders give each rank its share of one world-wide sequence of microbatches."""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from accelerate.state import GradientState

from finetune.config.sections.data import BatchingSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.loader import (
    DeviceCopyStream,
    EvaluationSampler,
    StepLoader,
    TrainSampler,
    evaluation_loader,
    train_loader,
)
from finetune.data.order.order import DatasetView, SetOrder
from finetune.data.sources.source import open_source
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from tests.devices import EVERY_DEVICE


def encode(rows):
    return [encode_row(row) for row in rows]


def encode_row(row):
    ids = np.frombuffer(row["text"].encode(), dtype=np.uint8).astype(np.uint32)
    return Features({"input_ids": ids, "is_target": np.ones(len(ids), bool)})


@dataclass(frozen=True)
class Collate:
    num_targets: int = 1

    def __call__(self, features):
        ids = tuple(each.sample_id for each in features)
        first = torch.tensor([int(each.arrays["input_ids"][0]) for each in features])
        return Batch({"input_ids": first[:, None]}, first[:, None], self.num_targets * len(ids), len(ids), ids)


def fill(features):
    assert features.sample_id == 0
    return Batch({"input_ids": torch.zeros(1, 1)}, torch.full((1, 1), -100), 0, 0, ())


@pytest.fixture
def prepared_and_section(write_rows, make_section):
    source = write_rows([{"text": chr(97 + n)} for n in range(10)])
    section = make_section(source)
    opened = open_source(source, key="data.train", log=lambda _: None)
    return prepare_set(opened, Encoding(encode, section, identity={}), log=lambda _: None), section


def per_step(sampler, *, world, num_batches):
    """Return the samples of each step, as Accelerate would share the microbatches among the ranks."""
    ranks = [
        list(BatchSamplerShard(sampler, num_processes=world, process_index=rank, even_batches=False))
        if world > 1
        else list(sampler)
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    steps = range(0, len(ranks[0]), num_batches)
    return [
        sorted(i for batches in ranks for b in batches[step : step + num_batches] for i in ids(b)) for step in steps
    ]


def ids(batch):
    """Return the sample ids of a microbatch, of which training's have seeds."""
    return [sample[0] if isinstance(sample, tuple) else sample for sample in batch]


def make_sampler(first_step=0, microbatch_size=2):
    return TrainSampler(
        SetOrder(seed=7, num_positions=30),
        global_batch_size=8,
        microbatch_size=microbatch_size,
        first_step=first_step,
        num_steps=9,
    )


@pytest.mark.parametrize(("world", "microbatch_size"), [(1, 8), (1, 2), (2, 2), (2, 4), (4, 2), (4, 1), (8, 1)])
def test_a_step_has_the_same_samples_at_any_world_size(world, microbatch_size):
    expected = [sorted(SetOrder(seed=7, num_positions=30).samples(s * 8, s * 8 + 8).tolist()) for s in range(9)]
    sampler = make_sampler(microbatch_size=microbatch_size)
    assert len(sampler) == 9 * 8 // microbatch_size
    assert per_step(sampler, world=world, num_batches=8 // microbatch_size // world) == expected


def test_resume_continues_with_the_very_next_sample():
    assert list(make_sampler(first_step=5)) == list(make_sampler())[5 * 4 :]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [1, 3, 7, 8, 9])
def test_evaluation_sees_each_row_once_and_every_rank_equally_many_batches(num_samples, world):
    order = SetOrder(seed=0, num_positions=num_samples, shuffle=False)
    sampler = EvaluationSampler(order, microbatch_size=2, world=world)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert len(batches) % world == 0
    assert [i for batch in batches for i in batch] == list(range(num_samples))
    per_rank = len(batches) // world
    assert per_step(sampler, world=world, num_batches=per_rank) == [list(range(num_samples))]


@pytest.mark.parametrize("keys", [{}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}])
def test_the_train_loader_gives_the_order(prepared_and_section, keys):
    prepared, section = prepared_and_section
    order = SetOrder(seed=7, num_positions=len(prepared))
    loader = train_loader(
        DatasetView(prepared, order, ""),
        Collate(),
        global_batch_size=4,
        microbatch_size=2,
        first_step=1,
        num_steps=6,
        section=section.model_copy(update=keys),
    )
    assert loader.prefetch_factor == keys.get("prefetch_factor")
    assert loader.num_workers == keys.get("num_workers", 0)
    steps = list(StepLoader(loader, 2, torch.device("cpu")))
    assert len(steps) == 5
    seen = [i for step in steps for batch in step for i in batch.sample_ids]
    assert seen == order.samples(4, 24).tolist()
    assert steps[0][0].inputs["input_ids"][:, 0].tolist() == [97 + i for i in seen[:2]]


def test_a_batch_knows_its_steps_seed_and_its_samples_lengths(prepared_and_section):
    prepared, section = prepared_and_section
    pool = DatasetView(prepared, SetOrder(seed=7, num_positions=len(prepared)), "")
    sizes = {"global_batch_size": 4, "microbatch_size": 2, "first_step": 0, "num_steps": 2}
    batches = list(train_loader(pool, Collate(), section=section, seed=5, **sizes))
    assert [len({each.seed for each in batches[i : i + 2]}) for i in (0, 2)] == [1, 1]
    assert len({each.seed for each in batches}) == 2
    assert all(batch.lengths == (1, 1) for batch in batches)


def test_a_partner_depends_on_step_and_sample_and_on_no_cut(prepared_and_section):
    prepared, section = prepared_and_section
    pool = DatasetView(prepared, SetOrder(seed=7, num_positions=len(prepared)), "")
    sizes = {"global_batch_size": 4, "first_step": 0, "num_steps": 9}
    found = []
    for size in (1, 2, 4):
        loader = train_loader(pool, list, microbatch_size=size, section=section, seed=5, has_partners=True, **sizes)
        drawn = [loader.dataset[each] for batch in loader.batch_sampler for each in batch]
        found.append([(each.sample_id, each.partner.sample_id, each.partner.seed == each.seed) for each in drawn])
    assert found[0] == found[1] == found[2]
    assert len({partner for _, partner, _ in found[0]}) == len(prepared)
    assert all(is_of_the_same_step for *_, is_of_the_same_step in found[0])


def test_evaluation_fills_up_with_batches_in_which_nothing_counts(prepared_and_section):
    prepared, section = prepared_and_section
    loader = evaluation_loader(prepared, Collate(), dummy_batch=fill, microbatch_size=4, world=4, section=section)
    batches = list(loader)
    assert [batch.sample_ids for batch in batches] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), ()]
    assert [batch.num_targets for batch in batches] == [4, 4, 2, 0]


def test_evaluation_packs_rows_like_training(prepared_and_section):
    prepared, section = prepared_and_section
    packed = section.model_copy(update={"batching": BatchingSection(by="packs", tokens=4)})
    loader = evaluation_loader(prepared, Collate(), dummy_batch=fill, microbatch_size=2, world=2, section=packed)
    batches = [batch.sample_ids for batch in loader]
    assert batches == [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9)]  # ten rows of one token


def test_loading_draws_nothing_from_the_global_generator(prepared_and_section):
    prepared, section = prepared_and_section
    loader = evaluation_loader(prepared, Collate(), dummy_batch=fill, microbatch_size=4, world=1, section=section)
    before = torch.get_rng_state()
    assert len(list(loader)) == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_last_group_that_is_not_full_is_an_error():
    assert list(StepLoader(iter("abcd"), 2, torch.device("cpu"))) == [("a", "b"), ("c", "d")]
    with pytest.raises(ValueError):
        list(StepLoader(iter("abc"), 2, torch.device("cpu")))


@pytest.fixture
def fresh_accelerate():
    """Leave no state of Accelerate behind for other tests."""
    yield
    PartialState._reset_state()
    GradientState._reset_state()


def test_worker_settings_of_the_loader_survive_accelerate_prepare(prepared_and_section, fresh_accelerate):
    prepared, section = prepared_and_section
    pool = DatasetView(prepared, SetOrder(seed=0, num_positions=len(prepared)), "")
    section = section.model_copy(update={"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3})
    sizes = {"global_batch_size": 4, "microbatch_size": 2, "first_step": 0, "num_steps": 2}
    loader = train_loader(pool, Collate(), section=section, **sizes)
    ready = prepare_data_loader(loader, torch.device("cpu"), num_processes=2, process_index=0, even_batches=False)
    for each in (loader, ready):
        assert (each.num_workers, each.persistent_workers, each.prefetch_factor) == (1, True, 3)


CPU = torch.device("cpu")


def batch_of(number: int) -> Batch:
    labels = torch.full((1, 2), number)
    return Batch({"input_ids": labels.clone()}, labels, 2, 2, (number,))


class Diary:
    """Notes what is copied and taken over, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def context(self):
        self.lines.append("copy")
        yield

    def wait_and_keep(self, group) -> None:
        self.lines.append(f"take over {group[0].sample_ids[0]}")


def test_each_group_is_yielded_once_after_the_next_one_is_copied():
    diary = Diary()
    handed = iter(StepLoader([batch_of(0), batch_of(1), batch_of(2)], 1, CPU, stream=diary))
    assert next(handed)[0].sample_ids == (0,)
    assert diary.lines == ["copy", "take over 0", "copy"]
    assert [group[0].sample_ids[0] for group in handed] == [1, 2]
    assert diary.lines == ["copy", "take over 0", "copy", "take over 1", "copy", "take over 2"]


def test_an_error_of_the_loader_is_raised_when_the_previous_group_is_requested():
    def failing():
        yield batch_of(0)
        raise ValueError("not full")

    handed = iter(StepLoader(failing(), 1, CPU, stream=Diary()))
    with pytest.raises(ValueError, match="not full"):
        next(handed)


def test_a_step_ends_when_the_next_group_is_requested():
    lines = []
    groups = iter(
        StepLoader(
            [batch_of(0), batch_of(1)],
            1,
            CPU,
            first_step=4,
            on_group=lambda step, group: lines.append(f"group of step {step}: {group[0].sample_ids}"),
            on_step_end=lambda step: lines.append(f"end of step {step}"),
        )
    )
    next(groups)
    assert lines == ["group of step 5: (0,)"]
    next(groups)
    assert lines[1:] == ["end of step 5", "group of step 6: (1,)"]


@EVERY_DEVICE
def test_copies_on_a_side_stream_equal_their_source(device):
    is_gpu, place = device == "cuda", torch.device(device)
    batches = (batch_of(number).pin_memory() if is_gpu else batch_of(number) for number in range(50))
    found = []
    for group in StepLoader(batches, 1, place, stream=DeviceCopyStream(place) if is_gpu else Diary()):
        if is_gpu:
            torch.cuda._sleep(100_000)  # what is computed lags behind the host
        found.append(group[0].inputs["input_ids"].sum())
    assert torch.stack(found).tolist() == [2 * number for number in range(50)]
