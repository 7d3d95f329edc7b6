"""Rules of `train:` - batch, budget, schedule, precision."""

from collections.abc import Iterator

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.wording import listed, nearest_multiples
from finetune.errors import Problem

BUDGETS = ("steps", "epochs", "tokens")


def batch_is_whole_microbatches(config: RunConfig) -> Iterator[Problem]:
    """A global batch is a whole number of microbatches, whatever the number of processes."""
    batch, microbatch = config.train.global_batch_size, config.train.microbatch_size
    if batch % microbatch:
        yield Problem(
            "train.global_batch_size",
            f"{batch} is not a multiple of `train.microbatch_size` ({microbatch}). "
            f"Nearest that are: {nearest_multiples(batch, microbatch)}.",
        )


def budget_is_one(config: RunConfig) -> Iterator[Problem]:
    """The budget is written exactly once."""
    written = [name for name in BUDGETS if getattr(config.train, name) is not None]
    if not written:
        yield Problem("train", f"there is no budget. Write one of {listed(BUDGETS, last='or')}.")
    for name in written[1:]:
        yield Problem(f"train.{name}", f"the budget is in `train.{written[0]}` already. Write only one of them.")


def warmup_is_one(config: RunConfig) -> Iterator[Problem]:
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


def weights_can_learn(config: RunConfig) -> Iterator[Problem]:
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


BATCH_RULES = (batch_is_whole_microbatches, budget_is_one, warmup_is_one, schedule_fits_its_steps, weights_can_learn)
