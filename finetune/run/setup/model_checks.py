"""The checks of a job's model: one list, with when each can be made.

A run makes all of them, each as early as it can. `check --model` makes those before weights are needed: in place of the
run's model, it builds one without values on the meta device. `plan` and `rehearse` read the config alone.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.data.features import Features
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import ModelError
from finetune.model.adapters.context import AdapterContext
from finetune.model.attention.implementation import check_isolation, require_position_ids
from finetune.model.attention.supported_models import carries_state, check_padding, randomness
from finetune.model.build import make_trainable, new_token_ids
from finetune.model.loading.architecture import load_model_config
from finetune.model.loading.config_values import positions_of
from finetune.model.loading.dry_run import meta_model
from finetune.model.loading.pretrained import pooling_warning
from finetune.model.processing import Processing, check_image_shape, load_processing
from finetune.registry.tasks import TASKS, ModelHead
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.model_problems import (
    computes_in_half,
    expert_target_problems,
    model_warnings,
    require_buildable,
    require_model_positions,
    require_valid_merge,
    resolve_padding_free,
    router_problems,
    stored_method_note,
)
from finetune.run.setup.patches import require_input_embeddings
from finetune.run.setup.strategy import (
    require_exact_slices,
    require_sliceable_model,
    require_splittable_model,
    require_supported_by_strategy,
    require_tied_weights_supported,
)
from finetune.run.setup.training_data import TrainingData
from finetune.runtime.optional import no_op
from finetune.runtime.parameters import InitContext
from finetune.strategy.protocol import Strategy
from finetune.task.lm_loss.target_loss import fallback_warning, resolve_kernel
from finetune.task.model_inputs import collate_row, forward_logits, is_padding_free, sample_logits, unwrap_model
from finetune.train.optim.parameter_groups import list_parameters, parameter_groups


class Stage(Enum):
    """When a check can be made."""

    JOB = auto()  # with the job and the strategy, on every rank
    CONFIG = auto()  # with the model's config, on one rank
    MODEL = auto()  # with the model's modules, which `check --model` builds without values
    PREPARED = auto()  # with the model as Accelerate prepared it, on every rank


WITHOUT_WEIGHTS = (Stage.JOB, Stage.CONFIG, Stage.MODEL)


@dataclass(frozen=True)
class CheckedJob:
    """A job, and the strategy that was launched; None if it is not known yet."""

    loaded: LoadedConfig
    strategy: Strategy | None = None
    builds: bool = True  # whether the model is built on the meta device to try its config
    data: TrainingData | None = None
    unwrapped_model: Any = None  # the run's own, once it is built
    prepared: PreparedModel | None = None  # once Accelerate has prepared it

    @property
    def config(self) -> RunConfig:
        """Return the job's sections."""
        return self.loaded.config

    @property
    def strategy_name(self) -> str:
        """Return the name of the strategy; empty if it is not known."""
        return "" if self.strategy is None else self.strategy.name

    @cached_property
    def processing(self) -> Processing:
        """Return tokenizer and processor; none of a tokenizer that has yet to be trained."""
        config = self.config
        if self.data is not None:
            return self.data.processing
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
        """Return the model with its adapters and frozen parameters, the run's or one on the meta device."""
        if self.unwrapped_model is not None:
            return self.unwrapped_model
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


def changes_config(section: ModelSection) -> bool:
    """Return whether the job writes values of the model's config, which are then tried before weights are loaded."""
    return section.from_config is not None or bool(section.config_changes)


def check_model(job: CheckedJob, stages: Iterable[Stage] = WITHOUT_WEIGHTS) -> tuple[str, ...]:
    """Return what to log about a model that can be trained as the job says. Collective once it is prepared.

    Raises ConfigError, ModelError or StrategyError if it cannot.
    """
    stages = tuple(stages)
    return tuple(line for check in MODEL_CHECKS if check.stage in stages for line in check.lines(job) or ())


@dataclass(frozen=True)
class ModelCheck:
    """A check: it raises what is wrong, and may yield lines to log."""

    stage: Stage
    lines: Callable[[CheckedJob], Iterable[str] | None]


def _frozen_weights_are_half(job: CheckedJob) -> Iterator[str]:
    sources = job.loaded.sources
    if sources and "model.dtype" not in sources and job.config.model.dtype == "bfloat16":
        yield (
            "model.dtype: auto: frozen weights are bfloat16, in which train.precision multiplies. float32 would round "
            "them in every pass, in twice the memory."
        )


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
    if (warning := require_model_positions(job.loaded)) is not None:
        yield f"warning: {warning}"


def _can_be_shared(job: CheckedJob) -> None:
    if job.strategy is not None:
        require_sliceable_model(job.config, size=job.strategy.expected.sequence_size)
        require_splittable_model(job.config, size=job.strategy.expected.tensor_size)


def _is_trainable(job: CheckedJob) -> None:
    parameter_groups(list_parameters(job.model), job.config.train.optimizer, job.config.train.unfreeze)


def _can_have_noise(job: CheckedJob) -> None:
    if job.config.train.embedding_noise:
        require_input_embeddings(job.model)


def _prepared(job: CheckedJob) -> tuple[TrainingData, PreparedModel]:
    assert job.data is not None and job.prepared is not None, "these checks are made once the model is prepared"
    return job.data, job.prepared


def _loss_kernel_is_used(job: CheckedJob) -> Iterator[str]:
    data, prepared = _prepared(job)
    kernel, _ = resolve_kernel(job.config.train.loss_kernel)
    if (warning := fallback_warning(prepared.model, data.task.head, kernel)) is not None:
        yield warning


def _samples_are_isolated(job: CheckedJob) -> Iterator[str]:
    data, prepared = _prepared(job)
    if (warning := randomness(unwrap_model(prepared.unwrapped_model).config)) is not None:
        yield f"warning: {warning}"
    require_sample_isolation(job.config, data, prepared)


def _slices_are_exact(job: CheckedJob) -> None:
    data, prepared = _prepared(job)
    model_config, device = unwrap_model(prepared.unwrapped_model).config, prepared.accelerator.device
    require_exact_slices(prepared.model, config=model_config, tokenizer=data.tokenizer, device=device)


MODEL_CHECKS = (
    ModelCheck(Stage.JOB, lambda job: require_supported_by_strategy(job.config, job.strategy_name)),
    ModelCheck(Stage.JOB, lambda job: require_valid_merge(job.config, strategy=job.strategy_name)),
    ModelCheck(Stage.JOB, _vectors_are_long_enough),
    ModelCheck(Stage.JOB, _pooling_is_the_models),
    ModelCheck(Stage.CONFIG, _can_be_built),  # first: the others read the same config
    ModelCheck(Stage.CONFIG, lambda job: stored_method_note(job.loaded, strategy=job.strategy_name)),
    ModelCheck(Stage.CONFIG, lambda job: job.loaded.refuse(expert_target_problems(job.config))),
    ModelCheck(Stage.CONFIG, lambda job: job.loaded.refuse(router_problems(job.config))),
    ModelCheck(Stage.CONFIG, _frozen_weights_are_half),
    ModelCheck(Stage.CONFIG, _has_positions),
    ModelCheck(Stage.CONFIG, _can_be_shared),
    ModelCheck(Stage.MODEL, lambda job: check_image_shape(job.model.config, job.processing.processor)),
    ModelCheck(Stage.MODEL, lambda job: require_tied_weights_supported(job.model, job.strategy_name)),
    ModelCheck(Stage.MODEL, _is_trainable),
    ModelCheck(Stage.MODEL, lambda job: model_warnings(job.config, job.model)),
    ModelCheck(Stage.MODEL, _can_have_noise),
    ModelCheck(Stage.PREPARED, _loss_kernel_is_used),  # the head is what the strategy and the adapters have left of it
    ModelCheck(Stage.PREPARED, _samples_are_isolated),
    ModelCheck(Stage.PREPARED, _slices_are_exact),
)
"""In the order in which they are made."""


def require_sample_isolation(config: RunConfig, training_data: TrainingData, prepared: PreparedModel) -> None:
    """Raise ModelError where the result of a sample would depend on others. Collective.

    Samples that share rows are checked not to affect each other, padded samples to give the same results as alone.
    """
    model, task = prepared.model, training_data.task
    model_config = unwrap_model(prepared.unwrapped_model).config
    is_requested = is_padding_free(config.data.batching)
    is_row = is_padding_free(resolve_padding_free(config).batching)
    is_already_checked = is_row and not is_requested and task.head == "causal_lm" and not carries_state(model_config)
    if is_already_checked or task.head in ("image_classification", "image_text_to_text"):
        return
    check = _check_rows if is_row else _check_padding
    was_training = model.training
    model.eval()
    check(config, training_data, prepared)
    model.train(was_training)


def _check_rows(config: RunConfig, training_data: TrainingData, prepared: PreparedModel) -> None:
    model, task, device = prepared.model, training_data.task, prepared.accelerator.device
    inner = unwrap_model(prepared.unwrapped_model)
    require_position_ids(frozenset(inspect.signature(inner.forward).parameters), config=inner.config)

    def row_logits(row: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the samples end to end, [tokens, outputs], or [samples, outputs] of a classifier."""
        ids = [np.array(sample, np.uint32) for sample in row]
        samples = [Features({"input_ids": sample}) for sample in ids]
        batch = collate_row(samples, {"input_ids": ids}, labels=torch.zeros(len(ids))).to(device)
        is_classifier = task.head == "sequence_classification"
        return sample_logits(model, batch) if is_classifier else forward_logits(model, batch)[0]

    def logits_alone(ids: Sequence[int]) -> Tensor:
        """Return the logits of one sample as a batch of its own, in the same shape."""
        batch = torch.tensor([ids], device=device)
        logits: Tensor = model(input_ids=batch, attention_mask=torch.ones_like(batch)).logits
        return logits if logits.dim() == 2 else logits[0]

    check_isolation(
        row_logits,
        config=inner.config,
        vocabulary_size=len(training_data.tokenizer),
        is_half=computes_in_half(config),
        logits_alone=None if task.head == "causal_lm" else logits_alone,
    )


def _check_padding(config: RunConfig, training_data: TrainingData, prepared: PreparedModel) -> None:
    model_config = unwrap_model(prepared.unwrapped_model).config
    has_several_texts = TASKS[config.task.name].has_several_texts
    evaluated = config.evaluate and config.evaluate.microbatch_size
    sizes = {config.train.microbatch_size, evaluated or config.train.microbatch_size}
    if sizes == {1} and not has_several_texts:
        return
    positions = positions_of(model_config)
    check_padding(
        partial(_padded_outputs, prepared.model, training_data.task.head, prepared.accelerator.device),
        config=model_config,
        tokenizer=training_data.tokenizer,
        longest=min(config.data.longest, positions.number if positions else config.data.longest),
        is_half=computes_in_half(config),
        advice="Its samples have several texts, so that no batch is without padding: use a model of another type."
        if has_several_texts
        else "Write `train.microbatch_size: 1` and, for evaluations, `evaluate.microbatch_size: 1`: single samples are "
        "not padded.",
    )


def _padded_outputs(
    model: nn.Module, head: ModelHead, device: torch.device, samples: Sequence[Sequence[int]]
) -> Tensor:
    """Return the model's outputs for padded samples, [samples, tokens, outputs] or [samples, outputs]."""
    rows = [torch.tensor(ids, device=device) for ids in samples]
    inner: Any = unwrap_model(model)
    pad_id = inner.config.get_text_config().pad_token_id or 0
    inputs = {
        "input_ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id),
        "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "use_cache": False,
    }
    if head == "seq2seq_lm":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    outputs: Any = model(**inputs)
    values: Tensor | None = getattr(outputs, "last_hidden_state" if head == "embedding" else "logits", None)
    if values is None:
        raise ModelError(f"`{inner.config.model_type}` returns no hidden states to make an embedding from.")
    return values
