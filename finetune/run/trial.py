"""The model that a job builds from its config is tried before anything that takes long."""

from finetune.config.run_config import RunConfig
from finetune.model.trial import try_model
from finetune.task.registry import head_of


def require_buildable(config: RunConfig) -> None:
    """Raise ModelError where the job's model cannot be built, or not be asked anything. Takes no memory for weights."""
    try_model(config.model, head=head_of(config.task.name))
