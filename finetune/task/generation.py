"""Evaluation by generation: the model answers validation prompts on all ranks, and the answers are scored."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.modeling_outputs import BaseModelOutput

from finetune.config.sections.evaluate import GenerateSection
from finetune.errors import ModelError, RegistryError, UserError
from finetune.registry.table import import_attribute
from finetune.registry.tasks import METRICS
from finetune.runtime import distributed
from finetune.runtime.parallel import tensor_group
from finetune.runtime.supervision.heartbeat import fault_point
from finetune.task.causal_lm import pad_id
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import GenerationPrompt
from finetune.task.upstream import through_wrappers

Metric = Callable[[Sequence[str], Sequence[str]], float]


@dataclass(frozen=True)
class Answer:
    """A prompt, the answer of the model and the reference answer, as text."""

    prompt: str
    answer: str
    reference: str


@dataclass(frozen=True)
class GenerationEvaluator:
    """Generates answers to prompts: greedily, in batches, the same number of batches on every rank."""

    section: GenerateSection
    prompts: Sequence[GenerationPrompt]
    tokenizer: Any
    stop_ids: frozenset[int]
    device: torch.device
    metrics: dict[str, Metric]

    def generate_all(self, model: nn.Module, *, step: int) -> list[Answer]:
        """Return the answers in the order of the prompts, on every rank; ranks that share layers share prompts.

        Collective.
        """
        size = tensor_group().size
        num_groups = distributed.world() // size
        own = list(self.prompts[distributed.rank() // size :: num_groups])
        num_prompts_per_rank = -(-len(self.prompts) // num_groups)
        answered: list[tuple[int, ...]] = []
        # prompts with images, and prompts of a model with prompt learning, are generated one by one
        has_images = any(prompt.inputs for prompt in self.prompts)
        batch_size = 1 if has_images or has_prompt_learning(model) else self.section.batch_size
        for start in range(0, num_prompts_per_rank, batch_size):
            fault_point("evaluate", step=step)
            batch = own[start : start + batch_size]
            answers = generate_tokens(
                model,
                batch or self.prompts[:1],  # a rank without a prompt must take part, too
                pad_id=pad_id(self.tokenizer),
                stop_ids=self.stop_ids,
                max_new_tokens=self.section.max_new_tokens,
                device=self.device,
            )
            answered += map(tuple, answers[: len(batch)])
        gathered = distributed.gather_objects(answered)[::size]

        def decode(ids: Sequence[int]) -> str:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

        return [
            Answer(
                str(self.tokenizer.decode(list(prompt.input_ids), skip_special_tokens=False)),
                decode(gathered[number % num_groups][number // num_groups]),
                decode(prompt.reference_ids),
            )
            for number, prompt in enumerate(self.prompts)
        ]

    def score(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return each metric over (answers, references)."""
        texts = [answer.answer for answer in answers]
        references = [answer.reference for answer in answers]
        scores: dict[str, float] = {}
        for name, metric in self.metrics.items():
            score: Any = metric(texts, references)
            try:
                scores[name] = float(score)
            except (TypeError, ValueError) as error:
                raise METRICS.refusal(name, score, "a number") from error
        return scores


def resolve_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics by their short names; raises UserError for one that cannot be imported."""
    metrics = {}
    for name in names:
        try:
            metric = METRICS.resolve(name) if name in METRICS else import_attribute(name)
            metrics[name.rpartition(":")[2]] = metric
        except (ImportError, RegistryError, ValueError) as error:
            raise UserError(
                f"evaluate.generate.metrics: `{name}` cannot be imported ({error}). Write `exact_match` or "
                "`package.module:function`, importable from the folder in which you launch."
            ) from error
    return metrics


def exact_match(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers equal to their reference, ignoring surrounding whitespace."""
    pairs = list(zip(answers, references, strict=True))
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / max(1, len(pairs))


_COMPUTED_BY_PEFT = frozenset({"position_ids", "cache", "past_key_values"})
"""Arguments that peft computes for prompt learning: of two caches, transformers 5.24 would ignore peft's prefix."""


@torch.no_grad()
def generate_tokens(
    model: nn.Module,
    prompts: Sequence[GenerationPrompt],
    *,
    pad_id: int,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    device: torch.device,
    processors: LogitsProcessorList | None = None,
) -> list[list[int]]:
    """Return the tokens with which the model continues each prompt greedily, up to and including the first stop token.

    `processors` change the logits before the highest is taken; they may sample by that.
    Prompts of text form one batch; a prompt with images, or for a model with prompt learning, must be a batch of its
    own. Every forward pass goes through the model's wrappers, and every rank runs as many as the longest answer of all
    ranks needs. The model's own generation settings (sampling, penalties, forced tokens) are ignored. The caller sets
    evaluation mode.
    Raises ModelError for a model that cannot generate. Collective.
    """
    inner: Any = unwrap_model(model)
    if not isinstance(inner, GenerationMixin):
        raise ModelError(f"evaluate.generate: {type(inner).__name__} cannot generate text. Remove evaluate.generate.")
    is_encoder_decoder = inner.config.is_encoder_decoder
    is_prompt_learning = has_prompt_learning(model)
    inputs = _inputs(prompts, pad_id=pad_id, device=device, pads_right=is_encoder_decoder)
    start_ids = (getattr(config, "decoder_start_token_id", None) for config in (inner.config, inner.generation_config))
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=pad_id,
        decoder_start_token_id=next((int(token) for token in start_ids if token is not None), pad_id),
    )
    settings.use_cache = not is_prompt_learning
    if is_encoder_decoder:
        inputs["encoder_outputs"] = _encode(model, inputs, start_id=settings.decoder_start_token_id)
    dropped = _COMPUTED_BY_PEFT if is_prompt_learning else frozenset()

    def first_row_stops(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:  # the others are its companions
        stops = torch.tensor(sorted(stop_ids), dtype=input_ids.dtype, device=input_ids.device)
        return torch.isin(input_ids[0, -1], stops).expand(len(input_ids))

    with _without_own_settings(inner), through_wrappers(model, inner, dropped=dropped):
        sequences = inner.generate(
            **inputs,
            generation_config=settings,
            logits_processor=processors or LogitsProcessorList(),
            stopping_criteria=StoppingCriteriaList([first_row_stops] if prompts[0].companion_ids else []),
            synced_gpus=distributed.world() > 1,
        )
    answers = []
    first = 1 if is_encoder_decoder else inputs["input_ids"].shape[1]  # the position after the prompt
    for row in sequences[: len(prompts), first:].tolist():
        end = next((index for index, token in enumerate(row) if token in stop_ids), len(row))
        answers.append(row[: end + 1])
    return answers


def has_prompt_learning(model: nn.Module) -> bool:
    """Return whether peft puts trained tokens, or keys and values, before the text (prompt and prefix tuning)."""
    inner: Any = model
    while inner is not None and not hasattr(inner, "peft_config"):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    return inner is not None and any(config.is_prompt_learning for config in inner.peft_config.values())


@contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """Replace the model's own generation settings in this context, since `generate` merges them with its arguments."""
    own_settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own_settings


def _inputs(
    prompts: Sequence[GenerationPrompt], *, pad_id: int, device: torch.device, pads_right: bool
) -> dict[str, Any]:
    """Return the model's inputs: the prompts' tokens, [batch, longest], and the images of the only prompt.

    A decoder's prompts are padded on the left, so that all answers start at one position; an encoder's on the right.
    A prompt without images may be followed by a companion row with a blank image.
    """
    rows = [prompt.input_ids for prompt in prompts]
    first = prompts[0]
    if first.companion_ids:
        rows.append(first.companion_ids)

    def pad(rows: Sequence[Sequence[int]], value: int) -> Tensor:
        side = "right" if pads_right else "left"
        return pad_sequence([torch.tensor(row) for row in rows], True, value, padding_side=side)

    inputs = {"input_ids": pad(rows, pad_id), "attention_mask": pad([[1] * len(row) for row in rows], 0)}
    inputs |= {name: pad(values, 0) for name, values in first.per_token.items()}
    return {name: tensor.to(device) for name, tensor in {**inputs, **first.inputs}.items()}


def _encode(model: nn.Module, inputs: dict[str, Any], *, start_id: int) -> BaseModelOutput:
    """Return the hidden states of the encoder, from a pass through the wrappers: `generate` calls it directly."""
    source = inputs["input_ids"]
    start = torch.full((len(source), 1), start_id, device=source.device)
    outputs = model(input_ids=source, attention_mask=inputs["attention_mask"], decoder_input_ids=start, use_cache=False)
    return BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
