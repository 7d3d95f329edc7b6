"""All that can be refused before data or weights are touched: strategy, adapters, export, and a model from values."""

from finetune.config.load import LoadedConfig
from finetune.run.build.model import require_adaptable, require_buildable, require_routers
from finetune.run.build.strategy import launched_strategy, require_supported_by_strategy
from finetune.run.context import RunContext, make_context
from finetune.run.final_export import require_mergeable
from finetune.run.remote.download import with_local_folder
from finetune.runtime import distributed
from finetune.runtime.text.library_output import quiet_libraries


def validate(loaded: LoadedConfig) -> RunContext:
    """Return the context of the run; raises ConfigError, StrategyError or ModelError, on every rank alike."""
    quiet_libraries(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    context = make_context(loaded, launched_strategy(loaded))
    require_supported_by_strategy(context.config, context.strategy.name)
    require_mergeable(context.config, strategy=context.strategy.name)
    return context


def validate_model(context: RunContext) -> None:
    """Raise an error where the values of `model.from_config` or `model.config` give no model.

    And where the model does not take the adapters, or lacks the routers that a key is about. On rank 0, with which all
    others exit.
    """
    if not distributed.is_main():
        return
    section = context.config.model
    if section.from_config is not None or section.config:
        require_buildable(context.loaded)
    require_adaptable(context.loaded, strategy=context.strategy.name)
    require_routers(context.loaded)
