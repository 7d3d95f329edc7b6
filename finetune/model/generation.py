"""Text generation with an unsharded model: greedy, or sampled with a seed per row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from finetune.errors import ModelError
from finetune.model.loading.hub import error_summary


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters; a temperature of 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@torch.no_grad()
def generate_batch(
    model: Any,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    *,
    sampling: SamplingParams,
    pad_id: int,
    stop_ids: frozenset[int],
    streamer: Any = None,
) -> list[list[int]]:
    """Return the generated tokens of each prompt, with the stop token, without padding.

    Each prompt is sampled with its own seed, so the result does not depend on batches or processes.
    """
    is_encoder = bool(getattr(model.config, "is_encoder_decoder", False))
    longest = max(map(len, prompts))
    side = "right" if is_encoder else "left"  # the answer follows its prompt directly
    rows = [torch.tensor(list(prompt)) for prompt in prompts]
    ids = pad_sequence(rows, True, pad_id, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, padding_side=side)
    settings = GenerationConfig(
        do_sample=False,  # sampling is done by the logits processors below
        max_new_tokens=sampling.max_new_tokens,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=pad_id,
    )
    try:
        generated = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
            logits_processor=logits_processors(sampling, seeds),
            streamer=streamer,
        )
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # of its own settings, which also apply
        raise ModelError(
            f"The model cannot generate: {error_summary(error)} Check its generation_config.json and config.json."
        ) from error
    start = 1 if is_encoder else longest  # a decoder starts with its start token
    answers = []
    for row in generated:
        tokens: list[int] = row[start:].tolist()
        end = next((index for index, token in enumerate(tokens) if token in stop_ids), None)
        while end is None and tokens and tokens[-1] == pad_id:
            tokens.pop()
        answers.append(tokens if end is None else tokens[: end + 1])
    return answers


def logits_processors(sampling: SamplingParams, seeds: Sequence[int]) -> LogitsProcessorList:
    """Return the processors that turn a greedy choice into a sample, with a seed per row; empty at temperature 0."""
    if sampling.temperature == 0.0:
        return LogitsProcessorList()
    warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if 0.0 < sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList([*warpers, _GumbelSampling(seeds)])


class _GumbelSampling(LogitsProcessor):  # type: ignore[misc]
    """Adds Gumbel noise per row: the argmax is then a sample from the distribution (Gumbel, 1954)."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[-1]
        noise = torch.stack([torch.empty(size).exponential_(generator=generator) for generator in self._generators])
        return scores - noise.log().to(scores)
