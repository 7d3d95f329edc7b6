"""The checks of a job's model before its weights are loaded: one list, with when each can be made.

A run makes those of the job and of the model's config; after them it builds the model itself. `check --model` makes all
of them: in place of the run's model, it builds one without values on the meta device.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import ModelError
from finetune.model.adapters.context import AdapterContext
from finetune.model.build import make_trainable
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.dry_run import meta_model
from finetune.model.loading.pretrained import pooling_warning
from finetune.model.processing import Processing, check_image_shape, load_processing
from finetune.model.tokenizer import new_token_ids
from finetune.registry.tasks import TASKS
from finetune.run.final_export import require_mergeable
from finetune.run.setup.forwards import EmbeddingNoise
from finetune.run.setup.model import (
    adapter_problems,
    require_buildable,
    require_positions,
    router_problems,
    stored_method_note,
)
from finetune.run.setup.strategy import (
    require_sliceable_model,
    require_splittable_model,
    require_supported_by_strategy,
    require_tied_weights_supported,
)
from finetune.runtime.optional import no_op
from finetune.runtime.parameters import InitContext
from finetune.strategy.protocol import Strategy
from finetune.train.optim.parameter_groups import list_parameters, parameter_groups


class Stage(Enum):
    """When a check can be made."""

    JOB = auto()  # with the job and the strategy, on every rank
    CONFIG = auto()  # with the model's config, on one rank
    MODEL = auto()  # with the model's modules, in place of which `check --model` builds them without values


@dataclass(frozen=True)
class CheckedJob:
    """A job, and the strategy that was launched; None where it is not known yet."""

    loaded: LoadedConfig
    strategy: Strategy | None = None
    builds: bool = True  # whether the model is built on the meta device to try its config

    @property
    def config(self) -> RunConfig:
        """Return the job's sections."""
        return self.loaded.config

    @property
    def strategy_name(self) -> str:
        """Return the name of the strategy; empty where it is not known."""
        return "" if self.strategy is None else self.strategy.name

    @cached_property
    def processing(self) -> Processing:
        """Return tokenizer and processor; none of a tokenizer that has yet to be trained."""
        config = self.config
        if config.model.tokenizer is not None and config.model.tokenizer.train is not None:
            return Processing()
        return load_processing(
            config.model,
            reads=TASKS[config.task.name].reads,
            texts=lambda: (),
            cache_folder=cache_folder(config.data),
            log=no_op,
            images=config.data.images,
        )

    @cached_property
    def model(self) -> Any:
        """Return the model to train on the meta device, with its adapters and frozen parameters; raises ModelError."""
        section, head = self.config.model, TASKS[self.config.task.name].head
        tokenizer = self.processing.tokenizer
        if section.lora is not None and section.lora.init == "loftq":  # reads the weights
            section = section.model_copy(update={"lora": section.lora.model_copy(update={"init": "default"})})
        if tokenizer is None:  # of the model, or yet to be trained
            changed = {"new_tokens": None, "peft": None if section.trains_prompt else section.peft}
            section = section.model_copy(update=changed)
        context = AdapterContext(
            seed=self.config.run.seed,
            head=head,
            init_context=InitContext(on_meta_device=True),
            tokenizer=tokenizer,
            new_ids=() if section.new_tokens is None else new_token_ids(tokenizer, section.new_tokens),
        )
        return make_trainable(meta_model(section, head=head), section, context)


def check_model(job: CheckedJob, stages: Iterable[Stage] = Stage) -> tuple[str, ...]:
    """Return what to log about a model that can be trained as the job says. Reads no weights.

    Raises ConfigError, ModelError or StrategyError where it cannot.
    """
    stages = tuple(stages)
    return tuple(line for check in MODEL_CHECKS if check.stage in stages for line in check.lines(job) or ())


@dataclass(frozen=True)
class ModelCheck:
    """A check: it raises what is wrong, and may yield lines to log."""

    stage: Stage
    lines: Callable[[CheckedJob], Iterable[str] | None]


def _vectors_are_long_enough(job: CheckedJob) -> None:
    if sizes := job.config.task.embedding.matryoshka_dims:
        whole = load_model_config(job.config.model).get_text_config().hidden_size
        if too_large := [size for size in sizes if size > whole]:
            raise ModelError(
                f"task.embedding.matryoshka_dims: {too_large[0]} is more than the {whole} numbers of this model's "
                "vectors. Remove it, or write a smaller one."
            )


def _pooling_is_the_models(job: CheckedJob) -> Iterator[str]:
    if TASKS[job.config.task.name].head == "embedding":
        warning = pooling_warning(job.config.model, job.config.task.embedding.pooling)
        yield from () if warning is None else (warning,)


def _can_be_built(job: CheckedJob) -> None:
    if job.builds:
        require_buildable(job.loaded)


def _has_positions(job: CheckedJob) -> Iterator[str]:
    if (warning := require_positions(job.loaded)) is not None:
        yield f"warning: {warning}"


def _can_be_shared(job: CheckedJob) -> None:
    if job.strategy is not None:
        require_sliceable_model(job.config, size=job.strategy.expected.sequence_size)
        require_splittable_model(job.config, size=job.strategy.expected.tensor_size)


def _is_trainable(job: CheckedJob) -> None:
    parameter_groups(list_parameters(job.model), job.config.train.optimizer, job.config.train.unfreeze)


def _can_have_noise(job: CheckedJob) -> None:
    if alpha := job.config.train.embedding_noise:
        EmbeddingNoise(job.model, alpha=alpha)


MODEL_CHECKS = (
    ModelCheck(Stage.JOB, lambda job: require_supported_by_strategy(job.config, job.strategy_name)),
    ModelCheck(Stage.JOB, lambda job: require_mergeable(job.config, strategy=job.strategy_name)),
    ModelCheck(Stage.JOB, _vectors_are_long_enough),
    ModelCheck(Stage.JOB, _pooling_is_the_models),
    ModelCheck(Stage.CONFIG, _can_be_built),  # first: the others read the same config
    ModelCheck(Stage.CONFIG, lambda job: stored_method_note(job.loaded, strategy=job.strategy_name)),
    ModelCheck(Stage.CONFIG, lambda job: job.loaded.refuse(adapter_problems(job.config))),
    ModelCheck(Stage.CONFIG, lambda job: job.loaded.refuse(router_problems(job.config))),
    ModelCheck(Stage.CONFIG, _has_positions),
    ModelCheck(Stage.CONFIG, _can_be_shared),
    ModelCheck(Stage.MODEL, lambda job: check_image_shape(job.model.config, job.processing.processor)),
    ModelCheck(Stage.MODEL, lambda job: require_tied_weights_supported(job.model, job.strategy_name)),
    ModelCheck(Stage.MODEL, _is_trainable),
    ModelCheck(Stage.MODEL, _can_have_noise),
)
"""In the order in which they are made. `run.setup.prepared_model` meets those of `Stage.MODEL` with the real model."""
