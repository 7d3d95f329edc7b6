"""Rules of `train:` - batch, budget, schedule, precision, optimizer, and which parameters are trained when."""

from collections.abc import Iterator

from finetune.config.formatting import closest_multiples, format_list
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.errors import Problem

BUDGETS = ("steps", "epochs", "tokens")


def batch_is_whole_microbatches(config: RunConfig) -> Iterator[Problem]:
    """A global batch is a whole number of microbatches, whatever the number of processes."""
    batch, microbatch = config.train.global_batch_size, config.train.microbatch_size
    if batch % microbatch:
        yield Problem(
            "train.global_batch_size",
            f"{batch} is not a multiple of `train.microbatch_size` ({microbatch}). "
            f"Nearest that are: {closest_multiples(batch, microbatch)}.",
        )


def budget_is_written_once(config: RunConfig) -> Iterator[Problem]:
    """The budget is written exactly once."""
    written = [name for name in BUDGETS if getattr(config.train, name) is not None]
    if not written:
        yield Problem("train", f"there is no budget. Write one of {format_list(BUDGETS, last='or')}.")
    for name in written[1:]:
        yield Problem(f"train.{name}", f"the budget is in `train.{written[0]}` already. Write only one of them.")


def warmup_is_written_once(config: RunConfig) -> Iterator[Problem]:
    """The warmup is written at most once."""
    schedule = config.train.schedule
    if schedule.warmup_steps is not None and schedule.warmup_fraction is not None:
        message = "the warmup is in `train.schedule.warmup_steps` already. Write only one of them."
        yield Problem("train.schedule.warmup_fraction", message)


def schedule_fits_its_steps(config: RunConfig) -> Iterator[Problem]:
    """Warmup and decay leave room for one another."""
    schedule, steps = config.train.schedule, config.train.steps
    warmup = schedule.warmup_steps
    if steps is not None and warmup is not None and warmup >= steps:
        message = f"{warmup} steps of warmup leave nothing of the {steps} in `train.steps`. Write a smaller number."
        yield Problem("train.schedule.warmup_steps", message)
    fraction = schedule.warmup_fraction or 0.0
    if fraction >= 1.0:
        message = "a warmup over all steps leaves no step at the full rate. Write a smaller fraction."
        yield Problem("train.schedule.warmup_fraction", message)
    elif schedule.name == "warmup_stable_decay" and fraction + schedule.decay_fraction > 1.0:
        message = f"with `warmup_fraction: {fraction:g}` at most {1 - fraction:g} is left. Write a smaller fraction."
        yield Problem("train.schedule.decay_fraction", message)


def dtype_fits_precision(config: RunConfig) -> Iterator[Problem]:
    """Trained weights are held in a type in which they can take small updates."""
    dtype, precision = config.model.dtype, config.train.precision
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(dtype)
    if half is None:
        return
    if adapter_of(config) is None and dtype == "float16":
        yield Problem(
            "model.dtype",
            "full fine-tuning in `float16` loses small updates and overflows. "
            "Write `float32` (with `train.precision: fp16` for speed), or train adapters with `model.lora`.",
        )
    elif adapter_of(config) is None and precision == "fp32":
        yield Problem(
            "train.precision",
            f"weights held in `{dtype}` are multiplied in `{dtype}`, never in fp32. "
            f"Write `precision: {half}`, or `model.dtype: float32`.",
        )
    elif precision not in (half, "fp32"):
        yield Problem(
            "train.precision",
            f"`{precision}` does not fit weights held in `{dtype}`. Write `{half}`, or change `model.dtype`.",
        )


BATCH_RULES = (
    batch_is_whole_microbatches,
    budget_is_written_once,
    warmup_is_written_once,
    schedule_fits_its_steps,
    dtype_fits_precision,
)


def schedule_free_needs_a_constant_schedule(config: RunConfig) -> Iterator[Problem]:
    """A schedule-free optimizer warms up and then keeps its rate; its average takes the place of a decay."""
    train = config.train
    if train.optimizer.name != "schedule_free_adamw":
        return
    if train.schedule.name != "constant":
        message = f"`optimizer.name: schedule_free_adamw` needs none, and here is `{train.schedule.name}`."
        yield Problem("train.schedule.name", f"{message} Write `schedule: {{name: constant}}`, with a warmup.")
    if train.average is not None:
        message = "`optimizer.name: schedule_free_adamw` evaluates and exports an average already. Remove it."
        yield Problem("train.average", message)
    if train.optimizer.betas[0] == 0.0:
        message = (
            "`schedule_free_adamw` finds its average through the first one, so it cannot be 0. Write `[0.9, 0.999]`."
        )
        yield Problem("train.optimizer.betas", message)


def trained_parameters_are_chosen_once(config: RunConfig) -> Iterator[Problem]:
    """What learns is said in one way."""
    model, unfreeze = config.model, config.train.unfreeze
    if model.freeze and model.train_only:
        yield Problem("model.train_only", "`model.freeze` says which parameters learn already. Write only one of them.")
    for index, section in enumerate(unfreeze):
        for pattern in section.patterns:
            if pattern in model.freeze:
                message = f"`{pattern}` never learns: it is in `model.freeze`, too. Remove it from one of them."
                yield Problem(f"train.unfreeze.{index}.patterns", message)


def later_starts_are_within_the_run(config: RunConfig) -> Iterator[Problem]:
    """Steps after which something begins lie within the run."""
    steps, average = config.train.steps, config.train.average
    if steps is None:
        return
    for index, section in enumerate(config.train.unfreeze):
        if section.after_steps >= steps:
            message = f"the run has {steps} steps, so they would never learn. Write fewer, or use `model.freeze`."
            yield Problem(f"train.unfreeze.{index}.after_steps", message)
    if average is not None and average.after_steps >= steps:
        message = f"the run has {steps} steps, so the average would never begin. Write fewer."
        yield Problem("train.average.after_steps", message)


def in_backward_fits_the_step(config: RunConfig) -> Iterator[Problem]:
    """An update within the backward pass is of the whole step, and needs to know nothing of the whole gradient."""
    train, key = config.train, "train.optimizer.in_backward"
    if not train.optimizer.in_backward:
        return
    if train.global_batch_size != train.microbatch_size:
        wanted = f"`train.microbatch_size: {train.global_batch_size}`, the global batch"
        yield Problem(key, f"parameters would learn from each microbatch by itself. Write {wanted}.")
    if train.max_gradient_norm is not None:
        message = "the gradient's norm is known only afterwards. Write `train.max_gradient_norm: null`."
        yield Problem(key, message)
    if train.nonfinite.action == "skip":
        message = "with `optimizer.in_backward`, parameters may have learnt before it is seen. Write `stop`."
        yield Problem("train.nonfinite.action", message)
    if train.precision == "fp16":
        message = "fp16 looks at the whole gradient for an overflow. Write `train.precision: bf16`."
        yield Problem(key, message)


def loss_kernel_supports_the_loss(config: RunConfig) -> Iterator[Problem]:
    """Others' kernels work out the cross-entropy itself."""
    kernel, task = config.train.loss_kernel, config.task
    for name in ("label_smoothing", "z_loss"):
        if kernel in ("liger", "cce") and getattr(task, name):
            yield Problem("train.loss_kernel", f"`{kernel}` knows no `task.{name}`. Write `chunked`, or remove that.")


TRAINING_RULES = (
    schedule_free_needs_a_constant_schedule,
    trained_parameters_are_chosen_once,
    later_starts_are_within_the_run,
    in_backward_fits_the_step,
    loss_kernel_supports_the_loss,
)
