"""The optimizer over the trained parameters.

Muon (Jordan et al., 2024) updates hidden matrices and AdamW everything else, combined in one optimizer. Muon
orthogonalizes the momentum of a matrix before applying it. Its updates are scaled to the root mean square of AdamW's
(Liu et al., 2025, arXiv:2502.16982), so both use the same learning rate and weight decay. `torch.optim.Muon` accepts
matrices only.

Lion (Chen et al., 2023, arXiv:2302.06675) takes the sign of an interpolated momentum, elementwise, so each rank updates
its own shard of a parameter, however it is sharded. bitsandbytes and torchao quantize or page AdamW's moments. 8 bits:
Dettmers et al., 2021, arXiv:2110.02861. 4 bits: Li et al., 2023, arXiv:2309.01507. Paged: Dettmers et al., 2023,
arXiv:2305.14314; CUDA moves them to the memory of the host while the GPU needs their space.

A moving average of the weights is stored with the optimizer's moments, so every strategy that shards optimizer state
(ZeRO's fp32 partitions, FSDP2's rows) shards it, too; optimizer hooks update it. In schedule-free AdamW (Defazio et
al., 2024, arXiv:2405.15682) the trained weights y interpolate between a fast sequence z and its average x, which is
evaluated and needs no schedule. The rule is the authors' own (package `schedulefree`); its counters are kept per
parameter, as plain numbers in the optimizer state, so that they remain correct where ZeRO steps some groups at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.errors import ModelError
from finetune.model.kernels.compilation import missing_triton_toolchain
from finetune.registry.optimizers import OPTIMIZERS
from finetune.runtime import seeds
from finetune.runtime.optional import lazily, require
from finetune.runtime.parameters import AVERAGE, AVERAGE_DECAY, NOT_YET_UNFROZEN, full_shape, local_tensor
from finetune.train.optim.low_bit import ROUNDING_KEYS, ROUNDING_STEP, LowBitAdamW
from finetune.train.optim.parameter_groups import (
    RATE_FACTOR,
    UNFREEZE_AFTER,
    NamedParameter,
    is_embedding,
    layer_of,
    parameter_groups,
)

with lazily():
    import transformers.optimization as optimization


INITIAL_COUNTS = {"step": 0, "weight_sum": 0.0, "lr_max": -1.0}
"""The counters before the first update: updates, sum of the average's weights, highest learning rate."""


class ScheduleFreeAdamW(torch.optim.Optimizer):
    """The package's update rule; instead of its `train` and `eval`, `train.evaluate.average_formula` is used."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        package = require("schedulefree", extra="optimizers", purpose="train.optimizer.name: schedule_free_adamw")
        self._rule = package.AdamWScheduleFree([torch.zeros(())], lr=learning_rate, betas=betas, eps=eps)
        super().__init__(groups, {**self._rule.defaults, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._rule.state = self.state
        for group in self.param_groups:
            by_counts: dict[tuple[Any, ...], list[Tensor]] = {}  # the parameters with a gradient, by equal counters
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.state[parameter]
                    key = tuple(own.get(name, initial) for name, initial in INITIAL_COUNTS.items())
                    by_counts.setdefault(key, []).append(parameter)
            for values, parameters in by_counts.items():
                counts = dict(zip(INITIAL_COUNTS, values, strict=True))
                is_plain = not any(isinstance(parameter, DTensor) for parameter in parameters)
                one = {**group, "params": parameters, "foreach": is_plain, "k": counts["step"], **counts}
                self._rule.param_groups = [one]
                self._rule.step()
                for parameter in parameters:
                    self.state[parameter].update(step=one["k"], weight_sum=one["weight_sum"], lr_max=one["lr_max"])


STARTS_AFTER, CONFIGURED_DECAY = "average_after", "average_kept"
"""Keys of a parameter group: the number of steps before the average starts, and its decay from then on."""


def keep_average(optimizer: torch.optim.Optimizer, section: AverageSection) -> None:
    """Register hooks that update average = decay * average + (1 - decay) * weights after every optimizer step.

    The average equals the weights for the first `after_steps` steps; `begin_step` sets the decay of each step.
    """
    first: dict[Tensor, Tensor] = {}

    def remember(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None and AVERAGE not in optimizer.state.get(parameter, {}):
                first[parameter] = parameter.detach().to(torch.float32, copy=True)

    @torch.no_grad()
    def follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # 1 if an fp16 overflow skipped a fused optimizer's update, whose `step` is called nevertheless and reads the
        # same flag on the device (`torch.amp.GradScaler`).
        overflow: Tensor | None = getattr(optimizer, "found_inf", None)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = optimizer.state[parameter]
                    if parameter in first:
                        state[AVERAGE] = first.pop(parameter)
                    share: float | Tensor = 1.0 - group[AVERAGE_DECAY]
                    if overflow is not None:
                        share = share * (1.0 - overflow.to(parameter.device))
                    local_tensor(state[AVERAGE]).lerp_(local_tensor(parameter).to(torch.float32), share)

    for group in optimizer.param_groups:
        group.update({AVERAGE_DECAY: 0.0, STARTS_AFTER: section.after_steps, CONFIGURED_DECAY: section.decay})
    optimizer.register_step_pre_hook(remember)
    optimizer.register_step_post_hook(follow)


IS_MUON = "is_muon"
"""The parameter-group key that is True if Muon, False if AdamW updates the group."""


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates groups marked `is_muon` with Muon and all others with AdamW; state names are torch's."""

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        of_muon = [group for group in groups if group[IS_MUON]]
        others = [group for group in groups if not group[IS_MUON]]
        rules: list[torch.optim.Optimizer] = [
            torch.optim.Muon(of_muon, lr=learning_rate, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            rules.append(torch.optim.AdamW(others, lr=learning_rate, betas=betas, eps=eps, fused=fused))
        super().__init__([group for rule in rules for group in rule.param_groups], {"lr": learning_rate})
        self._rules = rules

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for rule in self._rules:
            is_muon = isinstance(rule, torch.optim.Muon)
            # FSDP and Accelerate may have replaced both in the meantime.
            rule.param_groups = [group for group in self.param_groups if group[IS_MUON] == is_muon]
            rule.state = self.state
            rule.step()


def split_for_muon(
    groups: Sequence[dict[str, Any]], named_parameters: Sequence[NamedParameter]
) -> list[dict[str, Any]]:
    """Return the groups split into hidden matrices and the rest; raises ModelError if there is no hidden matrix.

    Hidden matrices are the two-dimensional parameters of numbered layers. Embeddings, heads, vectors, convolutions and
    experts stacked in one tensor are not.
    """
    hidden = {
        id(entry.parameter)
        for entry in named_parameters
        if len(full_shape(entry.parameter)) == 2 and layer_of(entry.name) is not None
        if not entry.is_vector and not entry.is_embedding and not any(map(is_embedding, entry.aliases))
    }
    split = [
        {**group, "params": chosen, IS_MUON: is_muon}
        for group in groups
        for is_muon in (True, False)
        if (chosen := [parameter for parameter in group["params"] if (id(parameter) in hidden) == is_muon])
    ]
    if not any(group[IS_MUON] for group in split):
        raise ModelError(
            "train.optimizer.name: muon updates matrices of numbered layers (`layers.0.`), and none of them is "
            "trained. Use adamw."
        )
    return split


Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class OptimizerInputs:
    """The inputs of an optimizer factory of the registry."""

    named_parameters: Sequence[NamedParameter]
    groups: Groups  # every group has a `weight_decay`
    section: OptimizerSection
    learning_rate: float

    @property
    def betas(self) -> tuple[float, float]:
        """Return the decay rates of both moments."""
        first, second = self.section.betas
        return first, second


def adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torch's AdamW."""
    return torch.optim.AdamW(
        inputs.groups,
        lr=inputs.learning_rate,
        betas=inputs.betas,
        eps=inputs.section.eps,
        fused=inputs.section.fused is not False,
    )


def sgd(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torch's SGD."""
    return torch.optim.SGD(inputs.groups, lr=inputs.learning_rate, momentum=inputs.section.momentum or 0.0)


def adafactor(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return transformers' Adafactor without relative steps: the learning rate is the schedule's."""
    optimizer: torch.optim.Optimizer = optimization.Adafactor(
        inputs.groups, lr=inputs.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False
    )
    return optimizer


def muon(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return Muon for hidden matrices and AdamW for the rest; raises ModelError if there is no hidden matrix."""
    momentum = inputs.section.momentum
    return MuonAndAdamW(
        split_for_muon(inputs.groups, inputs.named_parameters),
        learning_rate=inputs.learning_rate,
        momentum=0.95 if momentum is None else momentum,
        betas=inputs.betas,
        eps=inputs.section.eps,
        fused=inputs.section.fused is not False,
    )


def schedule_free_adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return schedule-free AdamW; raises MissingPackage if `schedulefree` is not installed."""
    return ScheduleFreeAdamW(
        inputs.groups, learning_rate=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps
    )


def build_optimizer(
    named_parameters: Sequence[NamedParameter],
    section: OptimizerSection,
    *,
    learning_rate: float,
    unfreeze: Sequence[UnfreezeSection] = (),
    average: AverageSection | None = None,
    seed: int = 0,
    build: Callable[[OptimizerInputs], torch.optim.Optimizer] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer over the trained parameters; raises ModelError if there are none.

    Parameters that are not yet unfrozen are skipped, and an average of the weights is kept if configured. `seed` seeds
    stochastic rounding. `build` replaces the registry's implementation.
    """
    groups = parameter_groups(named_parameters, section, unfreeze)
    if not groups:
        raise ModelError(
            "no parameter is trained: everything is frozen. Remove patterns from model.freeze, or set model.lora."
        )
    if section.in_backward:
        groups = [{**group, "params": [parameter]} for group in groups for parameter in group["params"]]
    dtypes = {
        str(entry.parameter.dtype).removeprefix("torch.") for entry in named_parameters if entry.parameter.requires_grad
    }
    if any(uses_low_bit_adamw(section, dtype=dtype) for dtype in dtypes):
        names = {id(entry.parameter): entry.name for entry in named_parameters}
        for group in groups:
            group[ROUNDING_KEYS] = [seeds.derive_seed(seed, "rounding", names[id(one)]) for one in group["params"]]
        optimizer: torch.optim.Optimizer = LowBitAdamW(
            groups,
            learning_rate=learning_rate,
            betas=(section.betas[0], section.betas[1]),
            eps=section.eps,
            state_dtype=getattr(torch, section.state_dtype) if section.state_dtype else None,
            rounds_weights=section.stochastic_rounding,
        )
    else:
        inputs = OptimizerInputs(named_parameters, groups, section, learning_rate)
        optimizer = (build or OPTIMIZERS.resolve(section.name))(inputs)
        if build is None and OPTIMIZERS[section.name].plugin:
            _require_optimizer_of(optimizer, groups, name=section.name)
    if unfreeze:
        optimizer.register_step_pre_hook(lambda optimizer, *_: drop_not_yet_unfrozen(optimizer))
    if average is not None:
        keep_average(optimizer, average)
    return optimizer


def _require_optimizer_of(optimizer: Any, groups: Groups, *, name: str) -> None:
    """Raise RegistryError unless a plugin has returned an optimizer of all parameters, and of no others."""
    expected = "a `torch.optim.Optimizer` of the given `groups`, each with its keys and a learning rate `lr`"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OPTIMIZERS.refusal(name, optimizer, expected)
    given = {id(parameter) for group in groups for parameter in group["params"]}
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if (num_missing := len(given - set(map(id, own)))) or len(own) != len(given):
        found = f"an optimizer with {num_missing:,} of {len(given):,} parameters missing and {len(own):,} in all"
        raise OPTIMIZERS.refusal(name, found, expected)
    keys = {"lr"}.union(*groups)
    if missing := {key for group in optimizer.param_groups for key in keys - group.keys()}:
        raise OPTIMIZERS.refusal(name, f"an optimizer whose groups lack {', '.join(sorted(missing))}", expected)


def begin_step(optimizer: Any, *, step: int, learning_rate: float) -> None:
    """Set the per-step values of every group of the (prepared) optimizer for the update after `step` steps.

    All of them depend on `step` only. A group's rate is `learning_rate` times its factor, or 0 before it is unfrozen.
    """
    for group in optimizer.param_groups:
        group[NOT_YET_UNFROZEN] = step < group.get(UNFREEZE_AFTER, 0)
        rate = 0.0 if group[NOT_YET_UNFROZEN] else learning_rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(group["lr"], torch.Tensor):  # of torchao, whose update is compiled
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
        if AVERAGE_DECAY in group:
            group[AVERAGE_DECAY] = group[CONFIGURED_DECAY] if step >= group[STARTS_AFTER] else 0.0
        if ROUNDING_KEYS in group:
            group[ROUNDING_STEP] = step + 1


def drop_not_yet_unfrozen(optimizer: Any) -> None:
    """Drop the gradients of groups that are not yet unfrozen, to exclude them from the norm and the moments.

    ZeRO keeps its gradients in its own buffers until its inner optimizer steps; there, a hook and the norm call this.
    """
    for group in optimizer.param_groups:
        if group.get(NOT_YET_UNFROZEN):
            for parameter in group["params"]:
                parameter.grad = None


def uses_low_bit_adamw(section: OptimizerSection, *, dtype: str) -> bool:
    """Return whether weights of this dtype need LowBitAdamW."""
    return section.stochastic_rounding or section.state_dtype not in (None, dtype)


def slow_update_warning(optimizer: torch.optim.Optimizer) -> str | None:
    """Return a warning if the optimizer's kernel cannot be compiled for this machine's GPU, else None."""
    if not isinstance(optimizer, LowBitAdamW) or not torch.cuda.is_available():
        return None
    missing = missing_triton_toolchain()
    if missing is None:
        return None
    return (
        "warning: train.optimizer: an update with rounded states or weights is one triton kernel per parameter, but "
        f"{missing}. Falling back to plain operators: about 60 kernels, several times slower."
    )


MOMENT = "exp_avg"
"""The key of the momentum in a parameter's optimizer state."""


class Lion(torch.optim.Optimizer):
    """Moves every weight by the learning rate in the direction of the sign of its interpolated momentum."""

    def __init__(self, groups: Sequence[dict[str, Any]], *, learning_rate: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient: algorithm 2 of the paper."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if MOMENT not in self.state[parameter]:
                    self.state[parameter][MOMENT] = torch.zeros_like(parameter)
            if not parameters:
                continue
            weights = [local_tensor(parameter) for parameter in parameters]
            gradients = [local_tensor(parameter.grad) for parameter in parameters]
            moments = [local_tensor(self.state[parameter][MOMENT]) for parameter in parameters]
            first, second = group["betas"]
            directions = torch._foreach_lerp(moments, gradients, 1.0 - first)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1.0 - second)


def lion(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return Lion over the groups."""
    return Lion(inputs.groups, learning_rate=inputs.learning_rate, betas=inputs.betas)


_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw": "PagedAdamW", "paged_adamw_8bit": "PagedAdamW8bit"}


def bitsandbytes_adamw(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return bitsandbytes' AdamW with 8-bit moments, with float32 or 8-bit moments in paged memory.

    Raises MissingPackage if it is missing, ModelError on unsupported devices.
    """
    name = inputs.section.name
    bitsandbytes = require("bitsandbytes", extra="quantization", purpose=f"train.optimizer.name: {name}")
    operator = "bitsandbytes::optimizer_update_8bit_blockwise"
    if not torch.cuda.is_available() and name != "adamw_8bit":
        raise ModelError(
            f"train.optimizer.name: {name} needs a CUDA GPU, whose driver moves the pages, and none was found. Write "
            "`name: adamw`."
        )
    if not torch.cuda.is_available() and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"):
        raise ModelError(
            f"train.optimizer.name: adamw_8bit needs a CUDA GPU and none was found: bitsandbytes "
            f"{bitsandbytes.__version__} does not support it on CPUs. Write `name: adamw` with `state_dtype: int8`."
        )
    return _build(getattr(bitsandbytes.optim, _BITSANDBYTES[name]), inputs)


def adamw_4bit(inputs: OptimizerInputs) -> torch.optim.Optimizer:
    """Return torchao's AdamW with 4-bit moments; raises MissingPackage if torchao is not installed.

    Parameters of fewer than 4,096 elements, or whose number of elements is not a multiple of 128, keep moments in full.
    The first step compiles the update: with triton on a GPU, with a C++ compiler on a CPU.
    """
    torchao_optim = require("torchao.optim", extra="torchao", purpose="train.optimizer.name: adamw_4bit")
    return _build(torchao_optim.AdamW4bit, inputs)


def _build(optimizer_class: Any, inputs: OptimizerInputs) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = optimizer_class(
        inputs.groups, lr=inputs.learning_rate, betas=inputs.betas, eps=inputs.section.eps
    )
    return optimizer
