"""The optimizers and learning rate schedules that `train.optimizer.name` and `train.schedule.name` choose from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """The state that a class of optimizers keeps for each parameter, except for numbers such as a step count."""

    class_name: str
    keys: tuple[str, ...] = ()  # tensors of the parameter's shape; empty where the state has another shape
    keys_by_setting: Mapping[str, str] = field(default_factory=dict)  # keys that exist if a setting is on
    is_elementwise: bool = True  # one state element per parameter element: it may be split at any element

    def keys_for(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys under these settings of an optimizer."""
        return (*self.keys, *(key for name, key in self.keys_by_setting.items() if settings.get(name)))


@dataclass(frozen=True, kw_only=True)
class OptimizerEntry(Entry):
    """An optimizer. Its implementation is a function from `train.optim.optimizers.OptimizerInputs` to the optimizer."""

    states: tuple[OptimizerState, ...]  # of every class that may implement it, DeepSpeed's included
    num_moments: int  # tensors of the parameter's size that it keeps
    moment_bytes: float | None = None  # of one element; None: as the parameter's, or `state_dtype`
    reads: frozenset[str] = frozenset()  # keys of `train.optimizer` that not all optimizers read
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of these keys, if they differ from the section's
    needs_matrices: bool = False  # whole ones: ZeRO gives flattened parts
    needs_cuda: bool = False
    may_be_offloaded: bool = False  # DeepSpeed has a version of it for the CPU
    needs_constant_schedule: bool = False  # it keeps an average of the weights, which replaces a decay
    fast_key: str | None = None  # of the state from which that average is computed

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.states or self.num_moments < 0:
            raise RegistryError(f"optimizer `{self.name}`: it needs the state of a class, and a number of moments.")
        if unread := set(self.defaults) - self.reads:
            raise RegistryError(f"optimizer `{self.name}`: has defaults of keys that it does not read: {unread}.")

    @property
    def has_divisible_state(self) -> bool:
        """Return whether ranks can share the state of a parameter; a checkpoint holds that of others only in whole."""
        return any(state.is_elementwise for state in self.states)


INT8_BYTES = 1.0 + 4 / 256
"""Of a moment with one float32 scale per 256 values."""

INT4_BYTES = 0.5 + 4 / 128
"""Of a moment with one float32 scale per 128 values."""

_ADAM_KEYS = ("exp_avg", "exp_avg_sq")
_AMSGRAD = {"amsgrad": "max_exp_avg_sq"}
_BETAS = frozenset({"betas", "eps"})

OPTIMIZERS = Table(
    "optimizer",
    OptimizerEntry,
    (
        OptimizerEntry(
            name="adamw",
            description="Loshchilov & Hutter, 2017, arXiv:1711.05101",
            implementation="finetune.train.optim.optimizers:adamw",
            states=(
                OptimizerState(class_name="AdamW", keys=_ADAM_KEYS, keys_by_setting=_AMSGRAD),
                OptimizerState(class_name="DeepSpeedCPUAdam", keys=_ADAM_KEYS),
                OptimizerState(class_name="FusedAdam", keys=_ADAM_KEYS),
                OptimizerState(class_name="LowBitAdamW"),  # plus a few per row: refused where rows are split
            ),
            num_moments=2,
            reads=_BETAS | {"fused", "state_dtype", "stochastic_rounding"},
            may_be_offloaded=True,
        ),
        OptimizerEntry(
            name="sgd",
            description="stochastic gradient descent, with `momentum` where that is set",
            implementation="finetune.train.optim.optimizers:sgd",
            states=(OptimizerState(class_name="SGD", keys_by_setting={"momentum": "momentum_buffer"}),),
            num_moments=1,
            reads=frozenset({"momentum"}),
        ),
        OptimizerEntry(
            name="adafactor",
            description="Shazeer & Stern, 2018, arXiv:1804.04235",
            implementation="finetune.train.optim.optimizers:adafactor",
            states=(OptimizerState(class_name="Adafactor", is_elementwise=False),),
            num_moments=0,  # a row and a column per matrix are negligible
        ),
        OptimizerEntry(
            name="adamw_8bit",
            description="AdamW of bitsandbytes, with 8-bit moments",
            implementation="finetune.train.optim.optimizers:bitsandbytes_adamw",
            states=(OptimizerState(class_name="AdamW8bit", is_elementwise=False),),
            num_moments=2,
            moment_bytes=INT8_BYTES,
            reads=_BETAS,
        ),
        OptimizerEntry(
            name="adamw_4bit",
            description="AdamW of torchao, with 4-bit moments (Li et al., 2023, arXiv:2309.01507)",
            implementation="finetune.train.optim.optimizers:adamw_4bit",
            states=(OptimizerState(class_name="AdamW4bit", is_elementwise=False),),
            num_moments=2,
            moment_bytes=INT4_BYTES,
            reads=_BETAS,
        ),
        OptimizerEntry(
            name="paged_adamw",
            description="AdamW of bitsandbytes, whose moments move to the host while the GPU is short of memory",
            implementation="finetune.train.optim.optimizers:bitsandbytes_adamw",
            states=(OptimizerState(class_name="PagedAdamW", is_elementwise=False),),
            needs_cuda=True,
            num_moments=2,
            moment_bytes=4.0,
            reads=_BETAS,
        ),
        OptimizerEntry(
            name="paged_adamw_8bit",
            description="the same, with 8-bit moments",
            implementation="finetune.train.optim.optimizers:bitsandbytes_adamw",
            states=(OptimizerState(class_name="PagedAdamW8bit", is_elementwise=False),),
            needs_cuda=True,
            num_moments=2,
            moment_bytes=INT8_BYTES,
            reads=_BETAS,
        ),
        OptimizerEntry(
            name="muon",
            description="Jordan et al., 2024; AdamW for everything but hidden matrices",
            implementation="finetune.train.optim.optimizers:muon",
            # Muon keeps 1 moment for a hidden matrix, `momentum_buffer`, and AdamW 2 for anything else.
            states=(OptimizerState(class_name="MuonAndAdamW", keys=_ADAM_KEYS),),
            num_moments=2,
            reads=_BETAS | {"momentum", "fused"},
            needs_matrices=True,
        ),
        OptimizerEntry(
            name="schedule_free_adamw",
            description="Defazio et al., 2024, arXiv:2405.15682; extra `optimizers`",
            implementation="finetune.train.optim.optimizers:schedule_free_adamw",
            states=(OptimizerState(class_name="ScheduleFreeAdamW", keys=("exp_avg_sq", "z")),),
            num_moments=2,
            reads=_BETAS,
            needs_constant_schedule=True,
            fast_key="z",
        ),
        OptimizerEntry(
            name="lion",
            description="Chen et al., 2023, arXiv:2302.06675; half of AdamW's state, at 3 to 10 times lower rates",
            implementation="finetune.train.optim.optimizers:lion",
            states=(OptimizerState(class_name="Lion", keys=("exp_avg",)),),
            num_moments=1,
            reads=frozenset({"betas"}),
            defaults={"betas": (0.9, 0.99)},
        ),
    ),
)

_OF_TORCH = (
    OptimizerState(class_name="Adam", keys=_ADAM_KEYS, keys_by_setting=_AMSGRAD),
    OptimizerState(class_name="NAdam", keys=_ADAM_KEYS),
    OptimizerState(class_name="RAdam", keys=_ADAM_KEYS),
    OptimizerState(class_name="Adagrad", keys=("sum",)),
    OptimizerState(class_name="RMSprop", keys=("square_avg",), keys_by_setting={"momentum": "momentum_buffer"}),
    OptimizerState(class_name="Adadelta", keys=("acc_delta", "square_avg")),
)
"""Optimizers that no name chooses, but whose state checkpoints can hold."""


def state_of_class(class_name: str) -> OptimizerState:
    """Return the state of an optimizer class; of an unknown one, that nothing is known about it."""
    known = (*(state for entry in OPTIMIZERS for state in entry.states), *_OF_TORCH)
    unknown = OptimizerState(class_name=class_name, is_elementwise=False)
    return next((state for state in known if state.class_name == class_name), unknown)


def describe_defaults(key: str) -> str:
    """Return the sentence of the reference page with the optimizers that have a default of their own for a key."""
    own = [f"`{entry.name}` {entry.defaults[key]}" for entry in OPTIMIZERS if key in entry.defaults]
    return f" Unset, {', '.join(own)}." if own else ""


@dataclass(frozen=True, kw_only=True)
class ScheduleEntry(Entry):
    """A shape. Its implementation is a function from a `Schedule` and the steps done to a factor, 1 at the peak."""

    decays: bool = True  # to `final_fraction`
    has_decay_phase: bool = False  # of its own, `decay_fraction` of the run


SCHEDULES = Table(
    "schedule",
    ScheduleEntry,
    (
        ScheduleEntry(
            name="constant",
            description="no decay",
            implementation="finetune.train.plan:constant",
            decays=False,
        ),
        ScheduleEntry(
            name="linear",
            description="a straight line to the end",
            implementation="finetune.train.plan:linear",
        ),
        ScheduleEntry(
            name="cosine",
            description="half a cosine to the end (Loshchilov & Hutter, 2016, arXiv:1608.03983)",
            implementation="finetune.train.plan:cosine",
        ),
        ScheduleEntry(
            name="warmup_stable_decay",
            description="constant, then a straight line over `decay_fraction` (Hu et al., 2024, arXiv:2404.06395)",
            implementation="finetune.train.plan:warmup_stable_decay",
            has_decay_phase=True,
        ),
    ),
)
