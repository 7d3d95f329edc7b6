"""torch.compile of the repeated layers or the whole body of a model, in place: no module or parameter is renamed.

It also estimates whether compilation pays: the time saved in a run against the time to compile.

Only the forward pass of training is compiled. Evaluation and generation run uncompiled, and so does training from the
moment the compiler fails.
"""

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.model.activations import take_checkpointing
from finetune.model.size import Shapes
from finetune.runtime.gpus import MEMORY_SHARE, GpuModel
from finetune.runtime.optional import require

BACKEND = "inductor"
"""torch's default compiler; for tests there is `aot_eager`, which traces but does not compile."""

RECOMPILE_LIMIT = 32
"""The maximum number of compiled variants of a layer type: by shape, layer attributes, and required gradients."""

TRAFFIC_PER_HIDDEN = 363.0
"""Bytes that element-wise kernels of a layer read and write per token, forward and backward, per unit of the hidden
width: two RMS norms in float32 (76 forward), two residual additions (12), rotary positions (25), copies (8), and twice
that backward. Counted in transformers' Llama, bf16."""

FUSED_TRAFFIC_PER_HIDDEN = 140.0
"""The same with torch.compile, which fuses them; about as with the kernels of liger-kernel."""

COMPILE_SECONDS = 60.0
"""Time to compile one kind of layer in its four graphs, forward and backward: an assumption. A CPU takes 44 s; a later
start reads the cache."""

MIN_GAIN = 2.0
"""`auto` compiles if it saves at least this multiple of the time to compile, since both are estimates."""

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

Log = Callable[[str], None]


@dataclass(frozen=True)
class CompilationEstimate:
    """The time to compile the repeated layers, and the time that it saves in a whole run, in seconds."""

    compile_seconds: float
    saved_seconds: float

    @property
    def pays(self) -> bool:
        """Return whether `model.compile: auto` compiles."""
        return self.saved_seconds >= MIN_GAIN * self.compile_seconds

    def __str__(self) -> str:
        return f"compiling takes about {self.compile_seconds:,.0f} s and saves about {self.saved_seconds:,.0f} s"


def estimate_compilation(
    shapes: Shapes, gpu: GpuModel, *, num_tokens: float, item_bytes: int, recomputes: bool, num_kinds: int = 1
) -> CompilationEstimate:
    """Return the estimate for a run in which one rank computes `num_tokens`, with `num_kinds` kinds of layers.

    The savings are memory traffic between matrix products, in elements of `item_bytes`.
    """
    saved_bytes = (TRAFFIC_PER_HIDDEN - FUSED_TRAFFIC_PER_HIDDEN) * shapes.hidden * shapes.layers * item_bytes / 2
    passes = 4 / 3 if recomputes else 1.0
    saved = num_tokens * saved_bytes * passes / (gpu.memory_bandwidth * MEMORY_SHARE)
    return CompilationEstimate(COMPILE_SECONDS * num_kinds, saved)


class Compilation:
    """State that all compiled modules of a model share: one compiled function, so that equal layers compile once."""

    def __init__(self, log: Log) -> None:
        self.failure: Exception | None = None
        errors = _torch_module("_dynamo.exc")
        self.errors = (errors.TorchDynamoException, errors.FailOnRecompileLimitHit)  # not the model's
        self.log = log
        # random numbers as in eager mode, so that compiling does not change dropout
        options: dict[str, Any] = {"options": {"fallback_random": True}} if BACKEND == "inductor" else {}
        self.forward = torch.compile(_forward, backend=BACKEND, **options)
        self._is_counted = False

    def count_graphs(self) -> None:
        """Warn after the first forward pass if it has no compiled graph: dynamo skips functions without an error."""
        if not self._is_counted and not _torch_module("_dynamo.utils").counters["stats"]["unique_graphs"]:
            self.log(
                "warning: model.compile: torch compiled nothing, so training continues uncompiled. `TORCH_LOGS=dynamo` "
                "shows why; write `compile: off` to train without it."
            )
        self._is_counted = True


class CompiledForward:
    """The forward of a module: compiled in training, uncompiled in evaluation and after a failure."""

    def __init__(self, module: nn.Module, compilation: Compilation) -> None:
        self._module, self._compilation, self._recompute = module, compilation, take_checkpointing(module)
        functools.update_wrapper(self, module.forward)

    def __call__(self, *values: Any, **named: Any) -> Any:
        """Return the result of the module's forward."""
        module, compilation = self._module, self._compilation
        if not (module.training and torch.is_grad_enabled()):
            return _forward(module, None, *values, **named)
        try:
            if compilation.failure is None:
                result = compilation.forward(module, self._recompute, *values, **named)
                compilation.count_graphs()
                return result
        except compilation.errors as error:
            compilation.failure = error
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            compilation.log(
                "warning: model.compile: the compiler failed, so training continues uncompiled "
                f"({' '.join([type(error).__name__ + ':', *lines[:2]])}). Write `compile: off`, or fix that and resume."
            )
        return _forward(module, self._recompute, *values, **named)


def compile_model(model: PreTrainedModel, mode: Literal["regional", "full"], *, log: Log) -> None:
    """Compile the model's repeated layers, or its body without the head, at their first forward pass in training.

    `model` is the one inside all wrappers, which may be applied before or after. Logs the compiled layers, or the
    reason for none.
    """
    reason = why_not_compilable()
    body: nn.Module = model.base_model  # the model without its head
    parts = [] if reason else [body] if mode == "full" else list(repeated_layers(model))
    if not parts:
        reason = reason or f"`{model.config.model_type}` has no repeated layers"
        log(f"warning: model.compile: {mode} was requested, but nothing is compiled: {reason}.")
        return
    settings: Any = _torch_module("_dynamo.config")
    settings.recompile_limit = RECOMPILE_LIMIT
    settings.fail_on_recompile_limit_hit = True  # logged and disabled, never silently compiled in part
    compilation = Compilation(log)
    for part in parts:
        forward = CompiledForward(part, compilation)
        part.forward = forward
    layer_types = ", ".join(sorted({type(part).__name__ for part in parts}))
    folder = _torch_module("_inductor.runtime.cache_dir_utils").cache_dir()
    log(
        f"compile: {mode}, {len(parts)} x {layer_types}, in the first steps; cached for later starts in {folder} (set "
        f"{CACHE_VARIABLE} to change it)"
    )
    if not torch.accelerator.is_available():
        log(
            "note: model.compile gains little on a CPU (1.1x, for almost a minute of compiling). "
            "Prefer `compile: off` for short runs."
        )


def repeated_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost module lists of one type: a model's layers, in order."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len({type(layer) for layer in child}) == 1:
            yield from (layer for layer in child if any(True for _ in layer.parameters()))
        else:
            yield from repeated_layers(child)


def why_not_compilable() -> str | None:
    """Return the reason why torch.compile does not work on this machine; None if it does."""
    try:
        _torch_module("_dynamo.eval_frame").check_if_dynamo_supported()
        if BACKEND == "inductor" and not torch.accelerator.is_available():
            _torch_module("_inductor.cpp_builder").get_cpp_compiler()
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        return f"torch.compile does not work on this machine ({first_line})"
    if BACKEND == "inductor" and torch.cuda.is_available():
        return missing_triton_toolchain()
    return None


def _forward(module: Any, recompute: Callable[..., Any] | None, *values: Any, **named: Any) -> Any:
    """Return the forward of the module's current class: FSDP2 changes it later, and recomputation uses the new one."""
    forward = type(module).forward
    if recompute is None:
        return forward(module, *values, **named)
    return recompute(functools.partial(forward, module, **named), *values)


def missing_triton_toolchain() -> str | None:
    """Return the missing requirement of triton on this machine; None if it works."""
    if not _torch_module("utils._triton").has_triton():
        return "triton is not installed, or does not support this GPU"
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        return "triton needs a C compiler (gcc or clang), and none was found"
    return None


def _torch_module(name: str) -> ModuleType:
    """Return a module of torch that is slow to import, so that only runs that compile import it."""
    return require(f"torch.{name}", extra="", purpose="model.compile")
