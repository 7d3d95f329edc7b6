"""Samples of the model under training, decoded on all ranks under any strategy, with their log-probabilities."""

from collections.abc import Mapping, Sequence
from typing import Any

from finetune.data.encoding.conversation import ChatPrompt, prompt_ids, read_prompt
from finetune.data.rows import RawRow, row_location
from finetune.data.templates.chat_template import stop_ids
from finetune.errors import DataError, UserError
from finetune.model.generation import SamplingParams, logits_processors
from finetune.run.session.engine import StepEngine, evaluating
from finetune.run.session.results import Prompt, Sample
from finetune.runtime import distributed
from finetune.runtime.seeds import derive_seed
from finetune.task.causal_lm import pad_id
from finetune.task.generation import generate_tokens, has_prompt_learning
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import GenerationPrompt


def sample(
    engine: StepEngine,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    batch_size: int,
) -> list[list[Sample]]:
    """Return `num_samples` answers to each prompt, the same at any number of ranks. Collective."""
    tokenizer, system = engine.tokenizer, engine.data.system_prompt
    sampling = SamplingParams(max_new_tokens, temperature, top_p)
    encoded = [_encode(tokenizer, prompt, number, system=system) for number, prompt in enumerate(prompts, 1)]
    _check(engine, encoded, num_samples=num_samples, sampling=sampling, batch_size=batch_size)
    seed = derive_seed(engine.components.seed, "session samples", engine.progress.step) if seed is None else seed
    jobs = [
        (ids, derive_seed(seed, "sample", number, copy))
        for number, ids in enumerate(encoded)
        for copy in range(num_samples)
    ]
    answers = _generate(engine, jobs, sampling=sampling, batch_size=batch_size)
    rows = [
        {"input_ids": [*ids, *answer], "weights": [0] * len(ids) + [1] * len(answer)}
        for (ids, _), answer in zip(jobs, answers, strict=True)
    ]
    scored = engine.log_probabilities(rows)
    samples = [
        Sample(ids, answer, str(tokenizer.decode(list(answer), skip_special_tokens=True)).strip(), log_probabilities)
        for (ids, _), answer, log_probabilities in zip(jobs, answers, scored, strict=True)
    ]
    return [samples[start : start + num_samples] for start in range(0, len(samples), num_samples)]


def _generate(
    engine: StepEngine, jobs: Sequence[tuple[tuple[int, ...], int]], *, sampling: SamplingParams, batch_size: int
) -> list[tuple[int, ...]]:
    """Return the answers in the order of the jobs, on every rank; each rank decodes as many batches. Collective."""
    rank, world, model = distributed.rank(), distributed.world(), engine.components.model
    size = 1 if has_prompt_learning(model) else batch_size
    own, num_per_rank = jobs[rank::world], -(-len(jobs) // world)
    answered: list[tuple[int, ...]] = []
    with evaluating(engine.components):
        for start in range(0, num_per_rank, size):
            chosen = own[start : start + size]
            batch = chosen or jobs[:1]  # a rank without a prompt must take part, too
            generated = generate_tokens(
                model,
                [GenerationPrompt(ids, ()) for ids, _ in batch],
                pad_id=pad_id(engine.tokenizer),
                stop_ids=stop_ids(engine.tokenizer),
                max_new_tokens=sampling.max_new_tokens,
                device=engine.components.accelerator.device,
                processors=logits_processors(sampling, [seed for _, seed in batch]),
            )
            answered += map(tuple, generated[: len(chosen)])
    gathered = distributed.gather_objects(answered)
    return [gathered[number % world][number // world] for number in range(len(jobs))]


def _encode(tokenizer: Any, prompt: Prompt, number: int, *, system: str | None) -> tuple[int, ...]:
    place = row_location("prompts", number)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    elements = list(prompt) if isinstance(prompt, Sequence) else []
    if elements and all(type(each) is int for each in elements):
        return tuple(elements)  # type: ignore[arg-type]
    if not elements or not all(isinstance(each, Mapping) for each in elements):
        raise DataError(f"{place}: is not a prompt. Pass a text, a list of turns, or a list of tokens.")
    read: ChatPrompt = read_prompt(RawRow("prompts", number, {"messages": elements}), system=system)
    return tuple(prompt_ids(tokenizer, read))


def _check(
    engine: StepEngine,
    prompts: Sequence[tuple[int, ...]],
    *,
    num_samples: int,
    sampling: SamplingParams,
    batch_size: int,
) -> None:
    counts = {"num_samples": num_samples, "max_new_tokens": sampling.max_new_tokens, "batch_size": batch_size}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise UserError(f"sample: {name} must be a whole number of at least 1, and is {count!r}.")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise UserError("sample: the temperature must be at least 0, and top_p above 0 and at most 1.")
    if not prompts:
        raise DataError("sample: there are no prompts. Pass at least one.")
    config: Any = getattr(unwrap_model(engine.components.model), "config", None)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [each for each in (limit, engine.data.longest) if each]
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    if limits and longest > min(limits):
        raise UserError(
            f"sample: the longest prompt and {sampling.max_new_tokens} new tokens are {longest}, and the model reads "
            f"at most {min(limits)} here (data.max_length, max_position_embeddings). Lower max_new_tokens."
        )
