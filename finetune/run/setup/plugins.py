"""What plugins give a run is the same on every rank, or the run does not start."""

from typing import Any

from finetune.config.plugins import used_entries
from finetune.config.run_config import RunConfig
from finetune.errors import RegistryError
from finetune.run.setup.build import BuiltRun
from finetune.runtime import distributed

_MAX_STEPS_COMPARED = 1_000


def require_same_on_all_ranks(config: RunConfig, built: BuiltRun) -> None:
    """Raise RegistryError if plugins give ranks different rows, optimizers or learning rates.

    A schedule is asked for its rates here, so that an invalid one is refused before the first step. Collective for a
    job with plugins.
    """
    names = [entry.name for _, entry in used_entries(config)]
    if not names:
        return
    schedule, num_steps = built.plan.schedule, built.plan.num_steps
    compared = [*range(0, num_steps, -(-num_steps // _MAX_STEPS_COMPARED)), num_steps - 1]
    settings = [_settings(group) for group in built.prepared.optimizer.param_groups]
    facts = {
        "rows": [built.training_data.training.fingerprint, num_steps],
        "the settings of the optimizer": settings,
        "learning rates": [schedule.learning_rate(step) for step in compared],
    }
    for rank, of_rank in enumerate(of_ranks := distributed.gather_objects(facts)):
        for title, value in of_rank.items():
            if value != of_ranks[0][title]:
                raise RegistryError(
                    f"{title} on rank {rank} are not those of rank 0. A plugin must return the same on every rank: one "
                    f"of {', '.join(dict.fromkeys(names))} reads the rank, the time, the host or unseeded randomness."
                )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group that are no tensors."""
    return {name: value for name, value in group.items() if isinstance(value, str | int | float | tuple | None)}
