"""The record of consumed samples, and the check that a checkpoint's samples are those of the order."""

import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from finetune.data.batch import Batch
from finetune.data.order.order import DatasetView, SetOrder
from finetune.data.token_cache.integrity import digest_of_step_ids, digest_of_steps
from finetune.errors import CheckpointError
from finetune.run.setup.components import open_sample_record
from finetune.run.state.resume import require_same_samples
from finetune.runtime.progress import Progress
from tests.refusals import refused
from tests.sample_records import read_samples


def group_of(*microbatches):
    return tuple(Batch({}, torch.zeros(0), 0, 0, sample_ids) for sample_ids in microbatches)


def record(run_folder, *groups, first_step=0):
    samples = open_sample_record(run_folder, first_step=first_step)
    for step, group in enumerate(groups, first_step + 1):
        samples.add(step, group)


def test_sample_ids_of_a_group_are_on_disk_when_it_was_added(tmp_path):
    samples = open_sample_record(tmp_path, first_step=0)
    samples.add(1, group_of((7, 2), (5, 0)))
    assert read_samples(tmp_path) == {1: [[[7, 2], [5, 0]]]}
    samples.add(2, group_of((1,), (3,)))
    assert (tmp_path / "samples" / "rank-00000.jsonl").read_text().splitlines()[1] == (
        '{"step": 2, "microbatches": [[1], [3]]}'
    )


def test_a_step_that_is_handed_out_again_stands_once_in_the_record(tmp_path):
    record(tmp_path, group_of((0,)), group_of((1,)), group_of((2,)))
    other = tmp_path / "samples" / "rank-00001.jsonl"  # of a second process, which is no longer there
    other.write_text('{"step": 1, "microbatches": [[8]]}\n{"step": 2, "microbatches": [[9]]}\n{"step": 3, "mic')
    record(tmp_path, group_of((1,)), first_step=1)
    assert read_samples(tmp_path) == {1: [[[0]], [[8]]], 2: [[[1]]]}


@dataclass(frozen=True)
class Marked:
    """Samples of which nothing is known but their marks."""

    checksums: np.ndarray

    def checksums_of(self, sample_ids):
        return self.checksums[sample_ids]


def pool_of(*, seed=1, first_mark=1):
    marks = np.arange(first_mark, first_mark + 10, dtype=np.uint64)
    return DatasetView(Marked(marks), SetOrder(seed=seed, num_positions=10), "f")


PATH = Path("runs/a/checkpoints/step-000004")


def test_a_checkpoint_that_has_seen_other_rows_is_refused():
    progress = Progress(step=4, samples_sha256=digest_of_steps(pool_of(), 4, global_batch_size=4))
    require_same_samples(PATH, progress, pool=pool_of(), global_batch_size=4)
    with refused(CheckpointError, "step-000004", "4 steps"):
        require_same_samples(PATH, progress, pool=pool_of(seed=2), global_batch_size=4)


def test_a_checkpoint_that_has_seen_the_same_rows_with_other_content_is_refused():
    progress = Progress(step=4, samples_sha256=digest_of_steps(pool_of(), 4, global_batch_size=4))
    with refused(CheckpointError, "step-000004"):
        require_same_samples(PATH, progress, pool=pool_of(first_mark=2), global_batch_size=4)


def test_a_checkpoint_of_before_contents_were_known_continues_and_knows_them_from_then_on():
    pool = pool_of()
    ids = digest_of_step_ids(pool.order, 4, global_batch_size=4)
    state = Progress(step=4, samples_sha256=ids).state_dict() | {"version": 2}
    progress = Progress.from_state_dict(state)
    assert progress.state_dict() == state, "unverified, it is saved unchanged"
    require_same_samples(PATH, progress, pool=pool, global_batch_size=4)
    assert progress.samples_sha256 == digest_of_steps(pool, 4, global_batch_size=4)
    assert progress.state_dict()["version"] == 3
    with refused(CheckpointError, "step-000004"):
        require_same_samples(PATH, Progress.from_state_dict(state), pool=pool_of(seed=2), global_batch_size=4)


def test_before_the_first_step_there_is_nothing_to_compare():
    require_same_samples(Path("a"), Progress(), pool=pool_of(), global_batch_size=4)


def test_damaged_lines_and_files_of_the_record_stop_no_run(tmp_path):
    folder = tmp_path / "samples"
    (folder / "rank-00001.jsonl").mkdir(parents=True)
    (folder / "rank-mine.jsonl").write_text("a user's own")
    lines = [
        '{"step": 1, "microbatches": [[4]]}',
        "[]",
        "3",
        '{"step": "1"}',
        '{"step": 1, "microbatches": 3}',
        "[" * 5000,
    ]
    (folder / "rank-00000.jsonl").write_text("\n".join(lines))
    record(tmp_path, group_of((1,)), first_step=1)
    assert read_samples(tmp_path) == {1: [[[4]]], 2: [[[1]]]}
    assert (folder / ".bad-rank-00001.jsonl").is_dir()
    assert (folder / "rank-mine.jsonl").read_text() == "a user's own"


def test_lines_that_do_not_fit_on_a_full_disk_are_written_when_there_is_space(tmp_path):
    samples = open_sample_record(tmp_path, first_step=0)
    samples.add(1, group_of((1,)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
    try:
        samples.add(2, group_of((2,)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read_samples(tmp_path).keys() == {1}
    samples.add(3, group_of((3,)))
    assert read_samples(tmp_path).keys() == {1, 2, 3}
