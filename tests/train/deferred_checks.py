"""A CPU reads later whether a gradient is finite, as a GPU does; its copies have arrived at once."""

import pytest
import torch

from finetune.train import update

_Event = torch.Event


class _ArrivedEvent:
    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


def defer_finite_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every device defer its finite checks."""
    monkeypatch.setattr(update, "defers_check_on", lambda device: True)
    monkeypatch.setattr(
        torch, "Event", lambda device: _ArrivedEvent() if device.type == "cpu" else _Event(device=device)
    )
