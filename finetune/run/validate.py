"""All that can be refused before data or weights are touched: strategy, adapters, export, and a model from values."""

import os

from finetune.config.load import LoadedConfig, with_local_folder
from finetune.errors import ModelError
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.pretrained import pooling_warning
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.context import RunContext, make_context
from finetune.run.final_export import require_mergeable
from finetune.run.setup.model import check_model
from finetune.run.setup.strategy import (
    launched_strategy,
    require_sliceable_model,
    require_splittable_model,
    require_supported_by_strategy,
)
from finetune.runtime import distributed
from finetune.runtime.text.terminal import quiet_libraries
from finetune.strategy.launch_file import is_set_by_accelerate
from finetune.strategy.protocol import Strategy


def validate(loaded: LoadedConfig) -> RunContext:
    """Return the context of the run; raises ConfigError, StrategyError or ModelError, on every rank alike."""
    quiet_libraries(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    context = make_context(loaded, launched_strategy(loaded))
    config, strategy = context.config, context.strategy.name
    require_supported_by_strategy(config, strategy)
    require_mergeable(config, strategy=strategy)
    if sizes := config.task.embedding.matryoshka_dims:
        whole = load_model_config(config.model).get_text_config().hidden_size
        if too_large := [size for size in sizes if size > whole]:
            raise ModelError(
                f"task.embedding.matryoshka_dims: {too_large[0]} is more than the {whole} numbers of this model's "
                "vectors. Remove it, or write a smaller one."
            )
    if TASKS[config.task.name].head == "embedding" and distributed.is_main():
        warning = pooling_warning(config.model, config.task.embedding.pooling)
        if warning is not None:
            context.log(warning)
    if distributed.world() > 1 and not is_set_by_accelerate(os.environ) and distributed.is_main():
        context.log(f"{strategy}: no accelerate file was given. --accelerate FILE chooses another strategy.")
    return context


def validate_model(loaded: LoadedConfig, strategy: Strategy, *, log: RunLog, on_every_rank: bool = False) -> None:
    """Raise an error where the values of `model.from_config` or `model.config` give no model.

    And where the model does not take the adapters or samples of that length, or lacks the routers that a key is about.
    On rank 0, with which all others exit, or on every rank: each raises it.
    """
    if not distributed.is_main() and not on_every_rank:
        return
    section = loaded.config.model
    builds = section.from_config is not None or bool(section.config_changes)
    for line in check_model(loaded, strategy=strategy.name, builds=builds):
        log(line)
    require_sliceable_model(loaded.config, size=strategy.expected.sequence_size)
    require_splittable_model(loaded.config, size=strategy.expected.tensor_size)
