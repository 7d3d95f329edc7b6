"""The result of a sample depends neither on other samples of its row nor on the padding of its batch."""

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from finetune.config.run_config import RunConfig
from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.model.attention.implementation import check_isolation, require_position_ids
from finetune.model.attention.supported_models import carries_state, check_padding
from finetune.model.loading.rope import positions_of
from finetune.registry.tasks import TASKS, ModelHead
from finetune.run.setup.accelerator import PreparedModel
from finetune.run.setup.model_problems import computes_in_half
from finetune.run.setup.padding_free import resolve_padding_free
from finetune.run.setup.training_data import TrainingData
from finetune.task.model_inputs import collate_row, forward_logits, is_padding_free, sample_logits, unwrap_model


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
