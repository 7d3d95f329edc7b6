"""Rules of how parameters learn: which of them, when, by which optimizer, and what is kept of them."""

from collections.abc import Iterator

from finetune.config.run_config import RunConfig
from finetune.errors import Problem


def schedule_free_has_no_schedule(config: RunConfig) -> Iterator[Problem]:
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


def parameters_learn_or_do_not(config: RunConfig) -> Iterator[Problem]:
    """What learns is said in one way."""
    model, unfreeze = config.model, config.train.unfreeze
    if model.freeze and model.train_only:
        yield Problem("model.train_only", "`model.freeze` says which parameters learn already. Write only one of them.")
    for index, section in enumerate(unfreeze):
        for pattern in section.patterns:
            if pattern in model.freeze:
                message = f"`{pattern}` never learns: it is in `model.freeze`, too. Remove it from one of them."
                yield Problem(f"train.unfreeze.{index}.patterns", message)


def what_begins_later_begins(config: RunConfig) -> Iterator[Problem]:
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


def updates_in_backward_know_enough(config: RunConfig) -> Iterator[Problem]:
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


def kernels_know_the_loss(config: RunConfig) -> Iterator[Problem]:
    """Others' kernels work out the cross-entropy itself."""
    kernel, task = config.train.loss_kernel, config.task
    for name in ("label_smoothing", "z_loss"):
        if kernel in ("liger", "cce") and getattr(task, name):
            yield Problem("train.loss_kernel", f"`{kernel}` knows no `task.{name}`. Write `chunked`, or remove that.")


LEARNING_RULES = (
    schedule_free_has_no_schedule,
    parameters_learn_or_do_not,
    what_begins_later_begins,
    updates_in_backward_know_enough,
    kernels_know_the_loss,
)
