"""`finetune init --from FILE --prove`: the learning rates of the peer's schedule next to those of the job."""

import math
from collections.abc import Iterator

import torch
from transformers import get_scheduler

from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.migration.draft import Draft
from finetune.train.optim.schedule import build_schedule

_ASSUMED_STEPS = 100
_FIRST_STEPS = 5
_THROUGH_TRAINER = ("axolotl", "TRL", "LLaMA-Factory", "ms-swift", "transformers' Trainer")
"""Those whose schedules are transformers' own."""


def format_rates(draft: Draft, config: RunConfig, *, title: str) -> Iterator[str]:
    """Yield a table of the learning rates of some steps, there and here; raises UserError where it cannot be made."""
    if title not in _THROUGH_TRAINER:
        raise UserError(f"--prove: {title} is not installed here, so nothing can be compared with it. Leave it out.")
    num_steps = config.train.steps or _ASSUMED_STEPS
    theirs = _their_rates(draft, config, num_steps)
    schedule = build_schedule(config.train.schedule, peak=config.train.learning_rate, num_steps=num_steps)
    ours = [schedule.learning_rate(step) for step in range(num_steps)]
    assumed = "" if config.train.steps else ", assumed: the job counts epochs or tokens"
    yield f"learning rates of {num_steps} steps{assumed}"
    yield f"{'step':>8} {'there':>12} {'here':>12}"
    later = range(_FIRST_STEPS, num_steps, max(1, num_steps // _FIRST_STEPS))
    for step in dict.fromkeys((*range(min(_FIRST_STEPS, num_steps)), *later, num_steps - 1)):
        yield f"{step + 1:>8} {theirs[step]:>12.4g} {ours[step]:>12.4g}"
    largest = max(abs(one - other) for one, other in zip(theirs, ours, strict=True)) / config.train.learning_rate
    yield f"largest difference: {largest:.2%} of the peak"


def _their_rates(draft: Draft, config: RunConfig, num_steps: int) -> list[float]:
    """Return the rates that transformers' schedule of the file's name gives, step by step."""
    name = draft.get("schedule", config.train.schedule.name)
    warmup = draft.get("warmup_steps") or draft.get("warmup_ratio") or 0
    num_warmup = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.train.learning_rate)
    options = {"num_decay_steps": num_steps // 5} if name == "warmup_stable_decay" else None
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=num_warmup,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=options,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"--prove: transformers cannot build the schedule `{name}` from its name alone.") from error
    rates = []
    for _ in range(num_steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates
