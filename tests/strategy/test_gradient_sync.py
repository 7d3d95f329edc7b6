"""Gradients of the microbatches before the last are added up where they are."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from finetune.strategy.gradient_sync import no_gradient_sync


class Told:
    """A model and an accelerator in one, which note what they are told."""

    def __init__(self, *, is_fsdp2: bool, reshards: bool | None) -> None:
        self.lines: list[str] = []
        self.is_fsdp2 = is_fsdp2
        plugin = None if reshards is None else SimpleNamespace(reshard_after_forward=reshards)
        self.state = SimpleNamespace(fsdp_plugin=plugin)

    @contextmanager
    def no_sync(self, model):
        self.lines.append("no sync")
        yield
        self.lines.append("sync")

    def set_reshard_after_backward(self, reshards: bool) -> None:
        self.lines.append(f"reshard {reshards}")


@pytest.mark.parametrize(("is_fsdp2", "reshards"), [(False, None), (True, True), (False, False)])
def test_the_ranks_do_not_speak(is_fsdp2, reshards):
    told = Told(is_fsdp2=is_fsdp2, reshards=reshards)
    with no_gradient_sync(told, told):
        assert told.lines == ["no sync"]
    assert told.lines == ["no sync", "sync"]


def test_where_there_is_room_parameters_stay_whole_until_the_last_microbatch():
    told = Told(is_fsdp2=True, reshards=False)
    with no_gradient_sync(told, told):
        assert told.lines == ["no sync", "reshard False"]
    assert told.lines == ["no sync", "reshard False", "reshard True", "sync"]
