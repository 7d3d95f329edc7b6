"""The transform from a head's output to logits: inferred from the model's config, verified with its own forward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLIERS = ("logit_scale", "logits_scaling", "output_multiplier")
"""Config names for a factor of the logits: Cohere, HyperCLOVA X, Muse."""

DIVISORS = ("logits_scaling",)
"""Config names for a divisor of the logits: Granite."""

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Config names for a soft cap of the logits: Gemma 2 and later, RecurrentGemma, xLSTM."""

_NUM_ROWS, _WIDTH = 3, 16


@dataclass(frozen=True)
class LogitTransform:
    """From the head's output x to logits: `scale x`; with a cap c (Gemma 2, arXiv:2408.00118) `c tanh(scale x / c)`."""

    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Return whether the head's output equals the logits."""
        return self.scale == 1.0 and self.soft_cap is None

    def apply(self, output: Tensor) -> Tensor:
        """Return the logits, differentiable."""
        scaled = output if self.scale == 1.0 else output * self.scale
        return scaled if self.soft_cap is None else torch.tanh(scaled / self.soft_cap) * self.soft_cap

    def apply_(self, output: Tensor) -> Tensor:
        """Overwrite the head's output with the logits."""
        if self.scale != 1.0:
            output.mul_(self.scale)
        return output if self.soft_cap is None else output.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def backward_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """Turn the gradient at the logits into that at the head's output, in place; overwrites soft-capped logits."""
        if self.soft_cap is not None:
            gradient.mul_(logits.div_(self.soft_cap).square_().neg_().add_(1))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


def find_logit_transform(model: nn.Module, head: nn.Module) -> LogitTransform | None:
    """Return the transform that the model applies to its head's output; None if its config does not determine it.

    `model` is the unwrapped model, `head` its linear layer. The model's own `forward` runs once per mode (training and
    evaluation) with a probe as the head's output and stand-ins for all other modules: no weight is read, no hook is
    called, the model does not change, and it takes about a millisecond.
    """
    probe = _probe(_WIDTH, head=head)
    try:
        logits = [_run_shell(model, head, probe=probe, training=mode) for mode in (True, False)]
    except Exception:  # the forward does not support the probe
        return None
    if any(output.shape != probe.shape or output.requires_grad for output in logits):  # such as a trained scale
        return None
    for transform in candidates(getattr(model, "config", None)):
        expected = transform.apply(probe)
        if all(torch.allclose(expected, output.to(expected.dtype), rtol=3e-6, atol=0.0) for output in logits):
            return transform
    return None


def candidates(config: Any) -> Iterator[LogitTransform]:
    """Yield the transforms that a config may define, the identity first; some names mean a factor or a divisor."""
    text = getattr(config, "get_text_config", lambda: config)()
    scales = [1.0, *(1.0 / divisor for divisor in _numbers(text, DIVISORS)), *_numbers(text, MULTIPLIERS)]
    for soft_cap in (None, *_numbers(text, SOFT_CAPS)):
        yield from (LogitTransform(scale, soft_cap) for scale in scales)


def is_rowwise(model: nn.Module, head: nn.Module) -> bool:
    """Return whether every row of logits depends on the same row of the head's output only."""
    probe = _probe(int(getattr(head, "out_features", _WIDTH)), head=head)
    first = probe[:, :1]
    after_others = torch.cat([2 * probe, first], dim=1)
    try:
        return all(
            leading.shape == probe.shape and torch.equal(alone, leading[:, :1]) and torch.equal(alone, trailing[:, -1:])
            for mode in (True, False)
            for alone, leading, trailing in [
                [_run_shell(model, head, probe=rows, training=mode) for rows in (first, probe, after_others)]
            ]
        )
    except Exception:  # as above
        return False


def _numbers(config: Any, names: tuple[str, ...]) -> list[float]:
    values = (getattr(config, name, None) for name in names)
    return [float(value) for value in values if isinstance(value, int | float) and value]


def _probe(width: int, *, head: nn.Module) -> Tensor:
    """Return values that distinguish a scale, a cap and any other transform, [1, rows, width]; rows differ."""
    device = next(iter(head.parameters()), torch.empty(0)).device
    values = torch.linspace(-4.0, 4.0, _NUM_ROWS * width)
    return (values.sign() * 10.0 ** values.abs()).view(1, _NUM_ROWS, width).to(device)  # up to 10^4, both signs


@torch.enable_grad()
def _run_shell(model: nn.Module, head: nn.Module, *, probe: Tensor, training: bool) -> Tensor:
    """Return the logits of a shell of the model whose head returns the probe.

    Raises ValueError unless the head is called exactly once.
    """
    calls: list[None] = []
    shell: Any = _shell(model, head=head, stand_in=_StandIn(probe, calls), training=training)
    ids = torch.zeros(
        1, 2, dtype=torch.int64, device=probe.device
    )  # fewer tokens than probe rows: their number must not matter
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    logits: Tensor = shell(**inputs).logits
    if len(calls) != 1:
        raise ValueError(f"the head was called {len(calls)} times")
    return logits.as_subclass(Tensor) if type(logits) is not Tensor else logits


def _shell(module: nn.Module, *, head: nn.Module, stand_in: "_StandIn", training: bool) -> nn.Module:
    """Return a copy without hooks: modules on the path to the head are copied, all others are stand-ins."""
    copy = object.__new__(type(module))  # FSDP2's classes override `__new__`, which would call `__init__`
    copy.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = type(copy.__dict__[name])()
    children: dict[str, Any] = {}
    for name, child in module._modules.items():
        if child is head:
            children[name] = stand_in
        elif child is not None and any(module is head for module in child.modules()):
            children[name] = _shell(child, head=head, stand_in=stand_in, training=training)
        else:
            hidden = torch.zeros(1, _NUM_ROWS, _WIDTH, device=stand_in.device).as_subclass(_BodyOutput)
            children[name] = None if child is None else _StandIn(hidden)
    copy.__dict__ |= {"_modules": children, "training": training}
    return copy


class _StandIn(nn.Module):
    """Returns the same tensor for all inputs."""

    device: torch.device

    def __init__(self, answer: Tensor, calls: list[None] | None = None) -> None:
        super().__init__()
        self.__dict__.update(_answer=answer, device=answer.device, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return torch.empty(0) if name in ("weight", "bias") else self  # such as the decoder of a body

    def forward(self, *values: Any, **named: Any) -> Tensor:
        """Return the stand-in's tensor."""
        if self.__dict__["_calls"] is not None:
            self.__dict__["_calls"].append(None)
        answer: Tensor = self.__dict__["_answer"]
        return answer


class _BodyOutput(Tensor):
    """Hidden states that also act as a body's output: `last_hidden_state` and index 0 are itself, the rest is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self if name == "last_hidden_state" else None

    def __getitem__(self, key: Any) -> Any:
        return self if type(key) is int and key == 0 else super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        yield self
