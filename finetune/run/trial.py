"""The model that a job builds from its config is tried before anything that takes long."""

from finetune.config.run_config import RunConfig
from finetune.model.trial import try_model
from finetune.runtime import ranks
from finetune.task.registry import head_of


def require_buildable(config: RunConfig) -> None:
    """Raise ModelError where the job's model cannot be built, or not be asked anything. Takes no memory for weights."""
    try_model(config.model, head=head_of(config.task.name))


def require_own_values_fit(config: RunConfig) -> None:
    """Do so before a run where the config's values are the job's own; on the main rank, with which all others end."""
    if config.model.from_config is not None and ranks.is_main():
        require_buildable(config)
