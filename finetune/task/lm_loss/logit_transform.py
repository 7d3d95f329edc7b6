"""How a model turns the output of its head into logits: read from its config, confirmed by its own forward."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLIERS = ("logit_scale", "logits_scaling", "output_multiplier")
"""Names of a config for a factor of the logits: of Cohere, of HyperCLOVA X, of Muse."""

DIVISORS = ("logits_scaling",)
"""Names of a config for a divisor of the logits: of Granite."""

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of a config for a cap of the logits: of Gemma 2 and later, of RecurrentGemma, of xLSTM."""

_NUM_ROWS, _WIDTH = 3, 16


@dataclass(frozen=True)
class LogitTransform:
    """From the head's output x to logits: `scale x`; with a cap c (Gemma 2, arXiv:2408.00118) `c tanh(scale x / c)`."""

    scale: float = 1.0
    soft_cap: float | None = None

    @property
    def is_identity(self) -> bool:
        """Return whether the head's output is the logits."""
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
        """Overwrite the gradient at the logits with the one at the head's output, and a capped model's logits, too."""
        if self.soft_cap is not None:
            gradient.mul_(logits.div_(self.soft_cap).square_().neg_().add_(1))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


def find_logit_transform(model: nn.Module, head: nn.Module) -> LogitTransform | None:
    """Return what the model makes of its head's output; None where nothing that its config says explains its forward.

    `model` is the one inside all wrappers, `head` its linear map. The model's own `forward` is run once per mode with a
    probe for the head's output and stand-ins for all other modules: no weight is read, no hook called, the model is
    left alone, and it costs about a millisecond.
    """
    probe = _probe(_WIDTH, device=_device(head))
    try:
        logits = [_run_shell(model, head, probe=probe, training=mode) for mode in (True, False)]
    except Exception:  # a forward that stumbles over the probe: it is not known
        return None
    if any(each.shape != probe.shape or each.requires_grad for each in logits):  # such as a scale that is trained
        return None
    confirmed = (each for each in candidates(getattr(model, "config", None)) if _explains(each, probe, logits))
    return next(confirmed, None)


def candidates(config: Any) -> Iterator[LogitTransform]:
    """Yield the transforms that a config may mean, none at first; a name can stand for a factor or for a divisor."""
    text = getattr(config, "get_text_config", lambda: config)()
    scales = [1.0, *(1.0 / each for each in _numbers(text, DIVISORS)), *_numbers(text, MULTIPLIERS)]
    for soft_cap in (None, *_numbers(text, SOFT_CAPS)):
        yield from (LogitTransform(scale, soft_cap) for scale in scales)


def is_rowwise(model: nn.Module, head: nn.Module) -> bool:
    """Return whether each row of logits depends on the same row of the head's output alone."""
    probe = _probe(int(getattr(head, "out_features", _WIDTH)), device=_device(head))
    first = probe[:, :1]
    behind_others = torch.cat([2 * probe, first], dim=1)
    try:
        return all(
            before.shape == probe.shape and torch.equal(alone, before[:, :1]) and torch.equal(alone, after[:, -1:])
            for mode in (True, False)
            for alone, before, after in [
                [_run_shell(model, head, probe=each, training=mode) for each in (first, probe, behind_others)]
            ]
        )
    except Exception:  # likewise
        return False


def _numbers(config: Any, names: tuple[str, ...]) -> list[float]:
    values = (getattr(config, name, None) for name in names)
    return [float(each) for each in values if isinstance(each, int | float) and each]


def _explains(transform: LogitTransform, probe: Tensor, logits: list[Tensor]) -> bool:
    wanted = transform.apply(probe)
    return all(torch.allclose(wanted, each.to(wanted.dtype), rtol=3e-6, atol=0.0) for each in logits)


def _device(head: nn.Module) -> torch.device:
    return next(iter(head.parameters()), torch.empty(0)).device


def _probe(width: int, *, device: torch.device) -> Tensor:
    """Return values that tell a scale, a cap and anything else apart, [1, rows, width]; rows differ."""
    values = torch.linspace(-4.0, 4.0, _NUM_ROWS * width)
    return (values.sign() * 10.0 ** values.abs()).view(1, _NUM_ROWS, width).to(device)  # up to 10^4, both signs


@torch.enable_grad()
def _run_shell(model: nn.Module, head: nn.Module, *, probe: Tensor, training: bool) -> Tensor:
    """Return the logits of a shell of the model whose head answers with the probe; raises ValueError unless once."""
    calls: list[None] = []
    shell: Any = _shell(model, head=head, stand_in=_StandIn(probe, calls), training=training)
    ids = torch.zeros(1, 2, dtype=torch.int64, device=probe.device)  # fewer than rows: nothing may depend on how many
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids
    logits: Tensor = shell(**inputs).logits
    if len(calls) != 1:
        raise ValueError(f"the head was called {len(calls)} times")
    return logits.as_subclass(Tensor) if type(logits) is not Tensor else logits


def _shell(module: nn.Module, *, head: nn.Module, stand_in: "_StandIn", training: bool) -> nn.Module:
    """Return the module without hooks: the way to the head is kept, all other modules are stand-ins."""
    copy = object.__new__(type(module))  # FSDP2's classes have a `__new__` of their own, which would call `__init__`
    copy.__dict__ = {name: value for name, value in module.__dict__.items() if name != "forward"}
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        copy.__dict__[name] = type(copy.__dict__[name])()
    children: dict[str, Any] = {}
    for name, child in module._modules.items():
        if child is head:
            children[name] = stand_in
        elif child is not None and any(each is head for each in child.modules()):
            children[name] = _shell(child, head=head, stand_in=stand_in, training=training)
        else:
            children[name] = None if child is None else _StandIn(_hidden_states(stand_in.device))
    copy.__dict__ |= {"_modules": children, "training": training}
    return copy


def _hidden_states(device: torch.device) -> Tensor:
    return torch.zeros(1, _NUM_ROWS, _WIDTH, device=device).as_subclass(_BodyOutput)


class _StandIn(nn.Module):
    """Answers with one tensor, whatever it is given."""

    device: torch.device

    def __init__(self, answer: Tensor, calls: list[None] | None = None) -> None:
        super().__init__()
        self.__dict__.update(_answer=answer, device=answer.device, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return torch.empty(0) if name in ("weight", "bias") else self  # such as the decoder of a body

    def forward(self, *values: Any, **named: Any) -> Tensor:
        """Return the answer."""
        if self.__dict__["_calls"] is not None:
            self.__dict__["_calls"].append(None)
        answer: Tensor = self.__dict__["_answer"]
        return answer


class _BodyOutput(Tensor):
    """Hidden states that are also the output of a body: its `last_hidden_state` and its first; all else is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self if name == "last_hidden_state" else None

    def __getitem__(self, key: Any) -> Any:
        return self if type(key) is int and key == 0 else super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        yield self
