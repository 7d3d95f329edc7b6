"""All that can be refused before data or weights are touched: strategy, adapters, export, and a model from values."""

import os

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.errors import ModelError
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.sentence_modules import pooling_warning
from finetune.registry.tasks import TASKS
from finetune.run.context import RunContext, make_context
from finetune.run.final_export import require_mergeable
from finetune.run.remote.download import with_local_folder
from finetune.run.setup.model import require_adaptable, require_buildable, require_positions, require_routers
from finetune.run.setup.strategy import launched_strategy, require_sliceable_model, require_supported_by_strategy
from finetune.runtime import distributed
from finetune.runtime.text.library_output import quiet_libraries
from finetune.strategy.launch_file import is_set_by_accelerate


def validate(loaded: LoadedConfig) -> RunContext:
    """Return the context of the run; raises ConfigError, StrategyError or ModelError, on every rank alike."""
    quiet_libraries(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    context = make_context(loaded, launched_strategy(loaded))
    require_supported_by_strategy(context.config, context.strategy.name)
    require_mergeable(context.config, strategy=context.strategy.name)
    _require_vector_sizes(context.config)
    _warn_of_other_pooling(context)
    _report_default_strategy(context)
    return context


def validate_model(context: RunContext) -> None:
    """Raise an error where the values of `model.from_config` or `model.config` give no model.

    And where the model does not take the adapters or samples of that length, or lacks the routers that a key is about.
    On rank 0, with which all others exit.
    """
    if not distributed.is_main():
        return
    section = context.config.model
    if section.from_config is not None or section.config_changes:
        require_buildable(context.loaded)
    require_adaptable(context.loaded, strategy=context.strategy.name)
    require_routers(context.loaded)
    require_sliceable_model(context.config, size=context.strategy.expected().sequence_size)
    warning = require_positions(context.loaded)
    if warning is not None:
        context.log(warning)


def _require_vector_sizes(config: RunConfig) -> None:
    """Raise ModelError where vectors are to be cut to a size that they do not have."""
    sizes = config.task.embedding.matryoshka_dims
    if not sizes:
        return
    whole = load_model_config(config.model).get_text_config().hidden_size
    too_large = [size for size in sizes if size > whole]
    if too_large:
        raise ModelError(
            f"task.embedding.matryoshka_dims: {too_large[0]} is more than the {whole} numbers of this model's vectors. "
            "Remove it, or write a smaller one."
        )


def _warn_of_other_pooling(context: RunContext) -> None:
    """Log a warning where the model of an embedding job was trained with another pooling."""
    if TASKS[context.config.task.name].head == "embedding" and distributed.is_main():
        warning = pooling_warning(context.config.model, context.config.task.embedding.pooling)
        if warning is not None:
            context.log(warning)


def _report_default_strategy(context: RunContext) -> None:
    """Log that it is DDP where several processes were started and nobody has chosen a strategy."""
    if distributed.world() > 1 and not is_set_by_accelerate(os.environ) and distributed.is_main():
        context.log(
            f"{context.strategy.name}: no accelerate file was given. --accelerate FILE chooses another strategy."
        )
