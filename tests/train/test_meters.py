"""A run that waits for its data loader warns once, after a full window."""

from dataclasses import replace

import pytest
import torch

from finetune.runtime import distributed
from finetune.train.meters import DataWaitMonitor, Meters, StepRecord, sum_over_ranks
from tests.devices import EVERY_DEVICE
from tests.refusals import pinned


def warnings(steps):
    """Return the warnings after each step of (waited, total) seconds."""
    wait = DataWaitMonitor()
    messages = []
    for waited, seconds in steps:
        wait.add(waited, of_seconds=seconds)
        messages.append(wait.warning())
    return [each for each in messages if each]


def test_a_run_that_waits_for_data_is_warned_once_with_a_remedy():
    (warning,) = warnings([(0.5, 2.0)] * 200)
    pinned(warning, "25%", "20 steps", "finetune doctor --data")


def test_the_wait_for_the_first_batch_does_not_count():
    assert warnings([(60.0, 61.0), *[(0.01, 2.0)] * 100]) == []


def test_a_little_waiting_for_data_gives_no_warning():
    assert warnings([(0.09, 1.0)] * 100) == []


def test_a_short_run_gives_no_warning_about_waiting_for_data():
    assert warnings([(0.2, 0.4)] * 20) == []  # eight seconds in all: too few to be sure


def test_waiting_for_data_late_in_a_run_is_warned_about():
    assert len(warnings([(0.0, 1.0)] * 100 + [(0.9, 1.0)] * 40)) == 1


BEYOND_FLOAT32 = 2**24 + 1  # the first whole number that float32 rounds


def test_a_count_of_targets_that_float32_would_round_stays_exact():
    sums = {
        "num_targets": torch.tensor(BEYOND_FLOAT32, dtype=torch.float64),
        "loss_sum": torch.tensor(0.5, dtype=torch.float64),
    }
    assert sum_over_ranks(sums) == {"num_targets": BEYOND_FLOAT32, "loss_sum": 0.5}


def test_the_sum_of_no_metrics_is_empty():
    assert sum_over_ranks({}) == {}


def step_record(*, device, norm_device):
    return StepRecord(
        number=1,
        losses=torch.tensor([1.5, 2.5], device=device),
        gradient_norm=torch.tensor(0.25, device=norm_device),
        is_taken=True,
        sample_ids=((0,), (1,)),
        learning_rate=0.1,
        num_targets=2,
        num_tokens=4,
        samples_sha256="",
        epoch=None,
        seconds=1.0,
        data_seconds=0.0,
        sums={"num_correct": torch.tensor(1.0, device=device)},
    )


class Joined(Exception):
    """Counts tensors when they are copied to the host."""


def test_a_gradient_norm_on_the_cpu_is_logged_with_losses_on_a_device(monkeypatch):
    def stop(tensor):
        raise Joined(tuple(tensor.shape), tensor.device.type)

    monkeypatch.setattr(torch.Tensor, "tolist", stop)
    meters = Meters()
    for _ in range(3):
        meters.add(step_record(device="meta", norm_device="cpu"))  # which torch refuses to mix, as CUDA and the CPU
    with pytest.raises(Joined) as found:
        meters.read()
    assert found.value.args == ((3, 3), "meta")


def test_the_loss_of_a_step_does_not_depend_on_the_steps_read_with_it(monkeypatch):
    shares = torch.tensor([1e8, 1.0, -1e8, 1.0])  # of four ranks: added in another order they are another number

    def gather(tensor, sizes):
        assert len(sizes) == 4 and tensor.shape[0] == sizes[0]
        return [tensor / tensor * share for share in shares]

    monkeypatch.setattr(distributed, "world", lambda: 4)
    monkeypatch.setattr(distributed, "gather_rows", gather)
    found = set()
    for count in (1, 2, 5):
        meters = Meters()
        for _ in range(count):
            meters.add(replace(step_record(device="cpu", norm_device="cpu"), num_targets=1))
        found |= {event.loss for _, event in meters.read()}
    assert found == {1.0}  # ((1e8 + 1) - 1e8) + 1 in float32, rank by rank


@EVERY_DEVICE
def test_the_numbers_of_a_step_arrive_unchanged(device):
    meters = Meters()
    meters.add(step_record(device=device, norm_device="cpu"))
    ((_, event),) = meters.read()
    assert (event.loss, event.gradient_norm) == (2.0, 0.25)


def test_a_logged_sum_of_any_shape_reaches_the_task_unchanged():
    seen = []
    meters = Meters(lambda sums, num_targets: seen.append(sums) or {})
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    record = step_record(device="cpu", norm_device="cpu")
    meters.add(replace(record, sums={"num_correct": torch.tensor(1.0), "tokens": tokens}))
    meters.read()
    assert seen == [{"num_correct": 1.0, "tokens": [[1.0, 2.0], [3.0, 4.0]]}]
