"""The next step's batches are on their way before this one's are handed out."""

from contextlib import contextmanager

import pytest
import torch

from finetune.data.batch import Batch
from finetune.data.device_prefetch import DeviceCopyStream, StepGroups
from tests.devices import EVERY_DEVICE

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
    handed = iter(StepGroups([batch_of(0), batch_of(1), batch_of(2)], 1, CPU, stream=diary))
    assert next(handed)[0].sample_ids == (0,)
    assert diary.lines == ["copy", "take over 0", "copy"]
    assert [group[0].sample_ids[0] for group in handed] == [1, 2]
    assert diary.lines == ["copy", "take over 0", "copy", "take over 1", "copy", "take over 2"]


def test_batches_are_yielded_uncopied_on_a_cpu():
    one, two = batch_of(0), batch_of(1)
    ((first, second),) = StepGroups([one, two], 2, CPU)
    assert first is one
    assert second is two


def test_an_error_of_the_loader_is_raised_when_the_previous_group_is_requested():
    def failing():
        yield batch_of(0)
        raise ValueError("not full")

    handed = iter(StepGroups(failing(), 1, CPU, stream=Diary()))
    with pytest.raises(ValueError, match="not full"):
        next(handed)


@EVERY_DEVICE
def test_copies_on_a_side_stream_equal_their_source(device):
    is_gpu, place = device == "cuda", torch.device(device)
    batches = (batch_of(number).pin_memory() if is_gpu else batch_of(number) for number in range(50))
    found = []
    for group in StepGroups(batches, 1, place, stream=DeviceCopyStream(place) if is_gpu else Diary()):
        if is_gpu:
            torch.cuda._sleep(100_000)  # what is computed lags behind the host
        found.append(group[0].inputs["input_ids"].sum())
    assert torch.stack(found).tolist() == [2 * number for number in range(50)]
