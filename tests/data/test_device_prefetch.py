"""The next step's batches are on their way before this one's are handed out."""

from contextlib import contextmanager

import pytest
import torch

from finetune.data.batch import Batch
from finetune.data.device_prefetch import DeviceCopyStream, prefetch, prefetch_to_device
from tests.devices import EVERY_DEVICE

CPU = torch.device("cpu")


def group_of(number: int) -> tuple[Batch, ...]:
    labels = torch.full((1, 2), number)
    return (Batch({"input_ids": labels.clone()}, labels, 2, 2, (number,)),)


class Diary:
    """Notes what is copied and taken over, in order."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @contextmanager
    def beside(self):
        self.lines.append("copy")
        yield

    def wait_and_keep(self, group) -> None:
        self.lines.append(f"take over {group[0].sample_ids[0]}")


def test_each_group_comes_once_and_the_one_after_it_is_copied_before():
    diary = Diary()
    handed = prefetch(iter([group_of(0), group_of(1), group_of(2)]), CPU, line=diary)
    assert next(handed)[0].sample_ids == (0,)
    assert diary.lines == ["copy", "take over 0", "copy"]
    assert [group[0].sample_ids[0] for group in handed] == [1, 2]
    assert diary.lines == ["copy", "take over 0", "copy", "take over 1", "copy", "take over 2"]


def test_on_a_cpu_the_groups_are_handed_on_as_they_are():
    group = group_of(0)
    assert next(prefetch_to_device(iter([group]), CPU)) is group


def test_an_error_of_the_loader_reaches_whoever_asks_for_the_group_before_it_was_copied():
    def failing():
        yield group_of(0)
        raise ValueError("not full")

    handed = prefetch(failing(), CPU, line=Diary())
    with pytest.raises(ValueError, match="not full"):
        next(handed)


@EVERY_DEVICE
def test_copies_on_a_side_stream_hold_what_was_to_be_copied(device):
    is_gpu, place = device == "cuda", torch.device(device)
    groups = (tuple(batch.pin_memory() if is_gpu else batch for batch in group_of(number)) for number in range(50))
    found = []
    for group in prefetch(groups, place, line=DeviceCopyStream(place) if is_gpu else Diary()):
        if is_gpu:
            torch.cuda._sleep(100_000)  # what is computed lags behind the host
        found.append(group[0].inputs["input_ids"].sum())
    assert torch.stack(found).tolist() == [2 * number for number in range(50)]
