"""The functions next to `train`: check, prepare, evaluate, generate, export. Each is a command of the same name.

They raise errors of `finetune.errors`, and leave the process as it was.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from finetune.api.job import JobLike, Overrides, api_function, as_job
from finetune.config.explain import format_summary
from finetune.config.load import require_divisible_batch
from finetune.config.overrides import override_text
from finetune.runtime.optional import lazily

with lazily():  # torch
    from finetune.commands import evaluate as evaluate_command
    from finetune.commands import export as export_command
    from finetune.commands import generate as generate_command
    from finetune.commands import prepare as prepare_command
    from finetune.run import in_process

DType = Literal["float32", "bfloat16", "float16"]
Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, the messages of a conversation, or a row with `prompt` or `messages`."""


@api_function
def check(job: JobLike, *, overrides: Overrides | None = None, num_processes: int | None = None) -> str:
    """Return what the job will do, in a few lines; raises ConfigError with all of its problems.

    With `num_processes`, also that they can share the global batch. Loads no weights and no data; imports no torch.
    """
    loaded = as_job(job).validated(overrides)
    if num_processes is not None:
        require_divisible_batch(loaded, num_processes=num_processes)
    return "\n".join(format_summary(loaded.config, num_processes=num_processes))


@api_function
def prepare(job: JobLike, *, overrides: Overrides | None = None) -> dict[str, Any]:
    """Tokenize the job's data now, which training then finds in the cache, and return the audit as plain values.

    Raises DataError for data that training would refuse.
    """
    loaded = as_job(job).load(overrides)
    with in_process.isolated_run():
        return prepare_command.tokenize_data(loaded).as_json()


@api_function
def evaluate(
    source: str | PathLike[str],
    *,
    step: int | None = None,
    job: JobLike | None = None,
    overrides: Overrides | None = None,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Return the metrics of a run, one of its checkpoints, or a model folder on a job's validation rows. Collective.

    `step` chooses a checkpoint, the newest by default. The job is the run's own by default; `overrides` change it.
    """
    with in_process.isolated_run():
        return evaluate_command.evaluate_model(
            Path(source),
            step=step,
            job=None if job is None else as_job(job).load(overrides),
            overrides=[override_text(key, value) for key, value in (overrides or {}).items()] if job is None else [],
            trust_remote_code=trust_remote_code,
        )


@api_function
def generate(
    source: str | PathLike[str],
    prompts: Sequence[Prompt],
    *,
    adapter: str | PathLike[str] | None = None,
    max_new_tokens: Annotated[int, Field(ge=1)] = 256,
    batch_size: Annotated[int, Field(ge=1)] = 8,
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0,
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0,
    seed: int = 0,
    system: str | None = None,
    probabilities: bool = False,
    trust_remote_code: bool = False,
) -> list[Any]:
    """Return a model's answer to each prompt, in their order: of `final/` of a run, or any model folder. Collective.

    Temperature 0 is greedy decoding. An answer does not depend on the number of processes. Models that do not generate
    text return a dictionary for each row, as `finetune generate` writes it: a class and its score, tags, a vector, ...
    """
    with in_process.isolated_run():
        return generate_command.generate_answers(
            Path(source),
            [_row(prompt) for prompt in prompts],
            generate_command.GenerationOptions(
                adapter=None if adapter is None else Path(adapter),
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                system=system,
                probabilities=probabilities,
                trust_remote_code=trust_remote_code,
            ),
        )


@api_function
def export(
    source: str | PathLike[str],
    *,
    to: str | PathLike[str] | None = None,
    step: int | None = None,
    dtype: DType | None = None,
    merge: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
    verify: bool | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write a checkpoint, or an adapter merged into its base, as a Hugging Face model folder; return the folder.

    `source` is a run, whose checkpoint `step` chooses, or a folder with a model or an adapter. With `push_to_hub`
    it is uploaded to that repository, too.
    """
    with in_process.isolated_run():
        return export_command.export(
            Path(source),
            step=step,
            to=None if to is None else Path(to),
            dtype=dtype,
            merge=merge,
            push_to_hub=push_to_hub,
            public=public,
            trust_remote_code=trust_remote_code,
            verify=verify,
        )


def _row(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    return {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
