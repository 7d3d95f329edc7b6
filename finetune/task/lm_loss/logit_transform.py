"""What a model does with the output of its head before it returns logits: a scale, a soft cap, or something unknown."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NUM_ROWS, _WIDTH = 3, 16
_TINY = 2.0**-12


@dataclass(frozen=True)
class LogitTransform:
    """From the head's output x to logits: `scale x`; with a cap c (Gemma 2, arXiv:2408.00118) `c tanh(scale x / c)`."""

    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Tell whether the head's output are the logits."""
        return self.scale == 1.0 and self.soft_cap is None

    def of(self, output: Tensor) -> Tensor:
        """Return the logits, differentiable."""
        scaled = output if self.scale == 1.0 else output * self.scale
        return scaled if self.soft_cap is None else torch.tanh(scaled / self.soft_cap) * self.soft_cap

    def apply_(self, output: Tensor) -> Tensor:
        """Overwrite the head's output with the logits."""
        if self.scale != 1.0:
            output.mul_(self.scale)
        return output if self.soft_cap is None else output.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Overwrite the gradient at the logits with the one at the head's output."""
        if self.soft_cap is not None:
            gradient.mul_(1 - (logits / self.soft_cap).square_())
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


@dataclass(frozen=True)
class HeadOutput:
    """How the head's output becomes logits."""

    finish: LogitTransform | None  # None: in no way that is known
    keeps_rows: bool  # each row of logits comes of the same row of the output, however many there are


def find_logit_transform(model: nn.Module, head: nn.Module) -> HeadOutput:
    """Return what the model makes of its head's output; `model` is the one inside all wrappers, `head` its linear map.

    The model's own `forward` is run with a probe for the head's output and nothing for the other modules: no weight is
    read, no hook called, the model is left alone, and it costs about a millisecond.
    """
    device = next(iter(head.parameters()), torch.empty(0)).device
    try:
        probe = _probe(_WIDTH).to(device)
        finishes = {_fit_transform(_ran(model, head, probe=probe, training=each)) for each in (True, False)}
    except Exception:  # a forward that stumbles over the probe: it is not known
        finishes = {None}
    if len(finishes) == 1 and None not in finishes:
        return HeadOutput(finishes.pop(), keeps_rows=True)
    try:
        probe = _probe(int(getattr(head, "out_features", _WIDTH))).to(device)
        return HeadOutput(None, all(_keeps_rows(model, head, probe=probe, training=each) for each in (True, False)))
    except Exception:  # likewise
        return HeadOutput(None, keeps_rows=False)


def _keeps_rows(model: nn.Module, head: nn.Module, *, probe: Tensor, training: bool) -> bool:
    """Tell whether a row becomes the same logits alone, among others, and behind them."""
    first = probe[:, :1]
    alone, before, behind = (
        _ran(model, head, probe=each, training=training)
        for each in (first, probe, torch.cat([2 * probe, first], dim=1))
    )
    return before.shape == probe.shape and torch.equal(alone, before[:, :1]) and torch.equal(alone, behind[:, -1:])


def _probe(width: int) -> Tensor:
    """Return values that tell a scale, a cap and anything else apart, [1, rows, width]; rows differ."""
    values = torch.linspace(-4.0, 4.0, _NUM_ROWS * width)
    values = values.sign() * 10.0 ** values.abs()  # up to 10^4, both signs
    values[:3] = torch.tensor([_TINY, 1e30, 1.0])
    return values.view(1, _NUM_ROWS, width)


def _fit_transform(logits: Tensor) -> LogitTransform | None:
    """Return what made these logits of the probe; None where no scale and cap explain them all."""
    probe = _probe(_WIDTH).to(logits.device)
    if logits.shape != probe.shape or logits.requires_grad:  # a scale that learns is none of ours
        return None
    if torch.equal(logits, probe):
        return LogitTransform()
    at_tiny, at_huge, _ = logits.flatten()[:3].tolist()
    cap = at_huge if math.isfinite(at_huge) and abs(at_huge) < 1e20 else None
    found = LogitTransform(_rounded(at_tiny / _TINY), cap)
    return found if torch.allclose(found.of(probe), logits, rtol=3e-6, atol=0.0) else None


def _rounded(scale: float) -> float:
    """Return the scale, or 1 where it is that within what float32 can tell of a capped value."""
    return 1.0 if abs(scale - 1.0) < 1e-6 else scale


@torch.enable_grad()
def _forward(model: nn.Module, device: torch.device) -> Tensor:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=device)  # there are more rows: nothing may depend on how many
    told: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        told["decoder_input_ids"] = ids
    logits: Tensor = model(**told).logits
    return logits


def _ran(model: nn.Module, head: nn.Module, *, probe: Tensor, training: bool) -> Tensor:
    """Return the logits of a copy of the model whose head answers with the probe."""
    answers: list[None] = []
    stand_in = _StandIn(probe, answers)
    logits = _forward(_skeleton(model, head=head, stand_in=stand_in, training=training), probe.device)
    if len(answers) != 1:
        raise ValueError(f"the head was asked {len(answers)} times")
    return logits.as_subclass(Tensor) if type(logits) is not Tensor else logits


def _skeleton(module: nn.Module, *, head: nn.Module, stand_in: "_StandIn", training: bool) -> Any:
    """Return the module without hooks; around the head it is kept so, all other modules are there in name only."""
    copy = type(module).__new__(type(module))
    copy.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = type(copy.__dict__[name])()
    children: dict[str, Any] = {}
    for name, child in module._modules.items():
        if child is head:
            children[name] = stand_in
        elif child is not None and any(each is head for each in child.modules()):
            children[name] = _skeleton(child, head=head, stand_in=stand_in, training=training)
        else:
            children[name] = None if child is None else _StandIn(_anything(stand_in.device))
    copy.__dict__ |= {"_modules": children, "training": training}
    return copy


def _anything(device: torch.device) -> Tensor:
    return torch.zeros(1, _NUM_ROWS, _WIDTH, device=device).as_subclass(_Anything)


class _StandIn(nn.Module):
    """Answers with one tensor, whatever it is asked."""

    device: torch.device

    def __init__(self, answer: Tensor, answers: list[None] | None = None) -> None:
        super().__init__()
        self.__dict__["_answer"], self.__dict__["device"] = answer, answer.device
        self.__dict__["_answers"] = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return torch.empty(0) if name in ("weight", "bias") else self  # such as the decoder of a body

    def forward(self, *values: Any, **named: Any) -> Tensor:
        """Return the answer."""
        if self.__dict__["_answers"] is not None:
            self.__dict__["_answers"].append(None)
        answer: Tensor = self.__dict__["_answer"]
        return answer


class _Anything(Tensor):
    """Hidden states that are also the output of a body: its `last_hidden_state` and its first; all else is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self if name == "last_hidden_state" else None

    def __getitem__(self, key: Any) -> Any:
        return self if type(key) is int and key == 0 else super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        yield self
