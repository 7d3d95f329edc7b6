"""Options of commands that read a run or model folder: trust in its code, arguments of its template, a new folder."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.checkpoint.format.layout import MANIFEST
from finetune.config.load import RESOLVED_NAME, LoadedConfig
from finetune.data.templates.rendering import arguments_of, set_template_arguments, unread_problems
from finetune.errors import UserError
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER


def with_trust(loaded: LoadedConfig, *, trust_remote_code: bool) -> LoadedConfig:
    """Return the run's job with `model.trust_remote_code` set to the caller's value.

    A run folder may come from someone else, as a model may: its resolved.yaml cannot grant trust.
    """
    model = loaded.config.model.model_copy(update={"trust_remote_code": trust_remote_code})
    return replace(loaded, config=loaded.config.model_copy(update={"model": model}))


def require_trusted_metrics(run_job: LoadedConfig, requested: LoadedConfig, *, trust_remote_code: bool) -> None:
    """Raise UserError if the metrics need Python functions that only the run's own record names."""
    functions = set(_functions(run_job)) & set(_functions(requested))
    if functions and not trust_remote_code:
        raise UserError(
            f"evaluate.generate.metrics: the run's {run_job.path.name} names the Python function "
            f"`{min(functions)}`, and its folder may come from others. If you trust it, add --trust-remote-code, or "
            "pass your own job with --config."
        )


def _functions(loaded: LoadedConfig) -> tuple[str, ...]:
    evaluate = loaded.config.evaluate
    generate = evaluate.generate if evaluate is not None else None
    return tuple(name for name in (generate.metrics if generate is not None else ()) if ":" in name)


def use_written_arguments(tokenizer: Any, texts: Sequence[str]) -> None:
    """Render prompts with these arguments (`NAME=VALUE`) of the chat template, in addition to the folder's.

    A value is JSON, or else a string. Raises UserError for an argument that the template never reads.
    """
    if not texts:
        return
    arguments: dict[str, Any] = {}
    for argument in texts:
        name, equals, text = argument.partition("=")
        if not (name and equals):
            raise UserError(f"--template-argument {argument}: write NAME=VALUE, such as enable_thinking=false.")
        try:
            arguments[name] = json.loads(text)
        except ValueError:
            arguments[name] = text
    problems = unread_problems(tokenizer, arguments, key="")
    if problems:
        raise UserError("\n".join(f"--template-argument {problem.key}: {problem.message}" for problem in problems))
    set_template_arguments(tokenizer, {**arguments_of(tokenizer), **arguments})


_WRITTEN_WHOLE = (MANIFEST, "model.safetensors", "model.safetensors.index.json", "adapter_config.json")
"""Files of checkpoints, models and adapters, whose folders hold nothing else."""


def new_folder(path: Path) -> Path:
    """Return the absolute path; raises UserError if it exists or is within a checkpoint or a model."""
    folder = path.absolute()
    if folder.exists():
        raise UserError(f"{folder}: already exists. Give another folder with --to, or delete this one.")
    for parent in folder.resolve().parents:
        is_of_run = (parent.parent / RESOLVED_NAME).is_file() and parent.name in (CHECKPOINTS_FOLDER, FINAL_FOLDER)
        if is_of_run or any((parent / name).is_file() for name in _WRITTEN_WHOLE):
            raise UserError(f"{folder}: is within {parent}, which this would damage. Give another folder with --to.")
    return folder
