"""Rules of `train:`: batch, budget, schedule, precision, optimizer and the trained parameters."""

from collections.abc import Iterator

from finetune.config.formatting import closest_multiples, format_list
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.errors import Problem
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES

BUDGETS = ("steps", "epochs", "tokens")


def batch_and_budget_fit(config: RunConfig) -> Iterator[Problem]:
    """The global batch is a multiple of the microbatch for any number of processes; a budget is set, and fits."""
    batch, microbatch = config.train.global_batch_size, config.train.known_microbatch_size
    if batch % microbatch:
        nearest = closest_multiples(batch, microbatch)
        message = f"{batch} is not a multiple of `train.microbatch_size` ({microbatch}). Nearest multiples: {nearest}."
        yield Problem("train.global_batch_size", message)
    if all(getattr(config.train, name) is None for name in BUDGETS):
        yield Problem("train", f"no budget is set. Set one of {format_list(BUDGETS, last='or')}.")
    if config.train.steps is not None:
        yield from step_problems(config, num_steps=config.train.steps)


def schedule_fractions_fit(config: RunConfig) -> Iterator[Problem]:
    """The fractions of warmup and decay together are at most 1."""
    schedule = config.train.schedule
    fraction = schedule.warmup_fraction or 0.0
    if fraction >= 1.0:
        message = "a warmup over all steps leaves no step at the full learning rate. Write a smaller fraction."
        yield Problem("train.schedule.warmup_fraction", message)
    elif SCHEDULES[schedule.name].has_decay_phase and fraction + schedule.decay_fraction > 1.0:
        message = f"with `warmup_fraction: {fraction:g}` at most {1 - fraction:g} is left. Write a smaller fraction."
        yield Problem("train.schedule.decay_fraction", message)


def dtype_fits_precision(config: RunConfig) -> Iterator[Problem]:
    """The dtype of trained weights can represent small updates, and fits `train.precision`."""
    dtype, precision = config.model.dtype, config.train.precision
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if half is None:
        return
    if adapter_of(config) is None and dtype == "float16":
        message = "full fine-tuning in `float16` loses small updates and overflows. Use `float32`, or `model.lora`."
        yield Problem("model.dtype", message)
    elif adapter_of(config) is None and precision == "fp32":
        message = (
            f"weights in `{dtype}` are multiplied in `{dtype}`. Write `precision: {half}`, or `model.dtype: float32`."
        )
        yield Problem("train.precision", message)
    elif precision not in (half, "fp32") and (half, precision) != ("bf16", "fp8"):
        message = f"`{precision}` does not fit weights in `{dtype}`. Write `{half}`, or change `model.dtype`."
        yield Problem("train.precision", message)


def fp8_is_supported(config: RunConfig) -> Iterator[Problem]:
    """Only linear layers that are not quantized multiply in 8 bits."""
    if config.train.precision == "fp8" and config.model.quantization is not None:
        message = "quantized layers do not multiply in 8-bit floats. Write `bf16`, or remove `model.quantization`."
        yield Problem("train.precision", message)


def schedule_free_needs_a_constant_schedule(config: RunConfig) -> Iterator[Problem]:
    """A schedule-free optimizer has a constant rate after the warmup; its average replaces a decay."""
    train, name = config.train, config.train.optimizer.name
    if not OPTIMIZERS[name].needs_constant_schedule:
        return
    if SCHEDULES[train.schedule.name].decays:
        message = f"`optimizer.name: {name}` needs a constant schedule, not `{train.schedule.name}`."
        yield Problem("train.schedule.name", f"{message} Write `schedule: {{name: constant}}`, with a warmup.")
    if train.average is not None:
        message = f"`optimizer.name: {name}` already evaluates and exports an average. Remove it."
        yield Problem("train.average", message)
    if train.optimizer.betas[0] == 0.0:
        message = f"`{name}` interpolates with the first beta, so it cannot be 0. Write `[0.9, 0.999]`."
        yield Problem("train.optimizer.betas", message)


def unfrozen_parameters_are_trained(config: RunConfig) -> Iterator[Problem]:
    """What is unfrozen later is not frozen for good."""
    for index, section in enumerate(config.train.unfreeze):
        for pattern in section.patterns:
            if pattern in config.model.freeze:
                message = f"`{pattern}` is never trained: it is in `model.freeze`, too. Remove it from one of them."
                yield Problem(f"train.unfreeze.{index}.patterns", message)


def step_problems(config: RunConfig, *, num_steps: int) -> Iterator[Problem]:
    """Yield a problem per key that counts steps and has no effect, or another one, in a run of that many.

    Cadences (`every_steps`) and `train.stop_after_steps` are upper limits, which a shorter run keeps.
    """
    train, profile = config.train, config.report.profile
    schedule, warmup, run = train.schedule, train.schedule.warmup_steps, f"the run has {num_steps} steps"
    decay = round(schedule.decay_fraction * num_steps) if SCHEDULES[schedule.name].has_decay_phase else 0
    if warmup and warmup >= num_steps:
        message = f"{run}, and {warmup} warmup steps leave none at the full learning rate. Write a smaller number."
        yield Problem("train.schedule.warmup_steps", message)
    elif warmup and warmup + decay > num_steps:
        message = f"{run}, the last {decay} of them for the decay. Write at most {num_steps - decay}."
        yield Problem("train.schedule.warmup_steps", message)
    for index, section in enumerate(train.unfreeze):
        if section.after_steps >= num_steps:
            message = f"{run}, so they would never be trained. Write fewer, or use `model.freeze`."
            yield Problem(f"train.unfreeze.{index}.after_steps", message)
    if train.average is not None and train.average.after_steps >= num_steps:
        yield Problem("train.average.after_steps", f"{run}, so averaging would never start. Write fewer.")
    if profile is not None and profile.start > num_steps:
        yield Problem("report.profile.start", f"{run}, so none would be profiled. Write at most {num_steps}.")


def in_backward_fits_the_step(config: RunConfig) -> Iterator[Problem]:
    """An update in the backward pass needs one microbatch per step, and no use of the whole gradient."""
    train, key = config.train, "train.optimizer.in_backward"
    if not train.optimizer.in_backward:
        return
    if train.global_batch_size != train.microbatch_size:
        expected = f"`train.microbatch_size: {train.global_batch_size}`, the global batch size"
        yield Problem(key, f"parameters would be updated after every microbatch. Write {expected}.")
    if train.max_gradient_norm is not None:
        message = "the gradient norm is known only after the backward pass. Write `train.max_gradient_norm: null`."
        yield Problem(key, message)
    if train.nonfinite.action == "skip":
        message = "with `optimizer.in_backward`, parameters may be updated before a NaN is found. Write `stop`."
        yield Problem("train.nonfinite.action", message)
    if train.precision == "fp16":
        message = "fp16 checks the whole gradient for overflows. Write `train.precision: bf16`."
        yield Problem(key, message)


def loss_fits_its_kernel(config: RunConfig) -> Iterator[Problem]:
    """Third-party kernels compute only the plain cross-entropy."""
    kernel, task = config.train.loss_kernel, config.task
    for name in ("label_smoothing", "z_loss"):
        if not LOSS_KERNELS[kernel].adapts_loss and getattr(task, name):
            message = f"`{kernel}` does not support `task.{name}`. Write `chunked`, or remove `task.{name}`."
            yield Problem("train.loss_kernel", message)


RULES = (
    batch_and_budget_fit,
    schedule_fractions_fit,
    dtype_fits_precision,
    fp8_is_supported,
    schedule_free_needs_a_constant_schedule,
    unfrozen_parameters_are_trained,
    in_backward_fits_the_step,
    loss_fits_its_kernel,
)
