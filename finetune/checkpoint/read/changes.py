"""Changes since the run that wrote a checkpoint, and the refusal of changes that affect the result. No torch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.config.sections.checkpoint import NEVER_ALLOWED
from finetune.errors import CheckpointError
from finetune.registry.model_choices import PEFT_TYPES, former_adapter
from finetune.runtime.text.redact import comparable_config
from finetune.runtime.text.terminal import format_json

ABSENT = "nothing"
_MAX_LENGTH = 80

DATA = "training data"
"""The digest of the prepared rows, followed by the version of the token cache that made it."""

CAUSES: Mapping[str, tuple[str, ...]] = {
    DATA: (
        "data.train.",
        "data.max_length",
        "data.over_length",
        "data.truncate_side",
        "data.no_target",
        "data.system_prompt",
        "data.train_on",
        "data.batching.",
        "data.validation.fraction",
        "data.validation.hash_fraction",
        "data.validation.exclude_from_train",
    ),
    "tokenizer": ("model.tokenizer", "data.chat_template"),
}
"""Settings that may explain why a digest differs, by the prefixes of their names."""


def check_changes(path: Path, saved: RunFingerprint, *, current: RunFingerprint, allowed: Sequence[str]) -> list[str]:
    """Return messages about what changed since the checkpoint; raises CheckpointError for a change that is not allowed.

    A change of `identity`, which alters the training result, must be in `allowed`. Names in `allowed` without a change
    are also reported.
    """
    settings = setting_differences(comparable_config(saved.settings), current.settings)
    former, messages = comparable_config(_with_peft_section(saved.identity)), []
    if is_other_cache_version(saved, current) and not any(key.startswith(CAUSES[DATA]) for key in settings):
        former[DATA] = current.identity[DATA]
        messages.append(f"{DATA}: compared by the samples so far: the checkpoint is of another version of the cache")
    identity = setting_differences(former, current.identity)
    refused = {name: pair for name, pair in identity.items() if name not in allowed or name in NEVER_ALLOWED}
    if refused:
        lines = [f"{path} was written by a run with other training settings"]
        for name, values in refused.items():
            lines.append(f"  {_difference(name, values)}")
            causes = [key for key in settings if name in CAUSES and key.startswith(CAUSES[name])]
            lines += [f"    {_difference(key, settings[key])}" for key in causes]
        restore = "Restore the values of the checkpoint, or write another run.folder to start from scratch"
        if never := [name for name in refused if name in NEVER_ALLOWED]:
            lines += [*(f"{name} cannot be changed: {NEVER_ALLOWED[name]}." for name in never), f"{restore}."]
        else:
            names = [*(name for name in identity if name in allowed), *refused]
            lines += [f"{restore}, or, to", "resume with the new values, write"]
            lines.append(f"  checkpoint.allow_changes: [{', '.join(dict.fromkeys(names))}]")
        raise CheckpointError("\n".join(lines))
    if identity:
        messages.append(f"changed since the checkpoint, allowed by checkpoint.allow_changes: {_arrows(identity)}")
    if settings:
        messages.append(f"changed since the checkpoint: {_arrows(settings)}")
    unused = [name for name in allowed if name not in identity]
    if unused:
        messages.append(f"checkpoint.allow_changes: has no effect, unchanged since the checkpoint: {', '.join(unused)}")
    return messages


def is_other_cache_version(saved: RunFingerprint, current: RunFingerprint) -> bool:
    """Return whether the digests of the rows cannot be compared: another version of the token cache made one of them.

    Up to 0.2 no version was recorded.
    """
    digests = [run.identity[DATA] for run in (saved, current) if DATA in run.identity]
    return len({digest.rpartition("-")[2] if "-" in digest else "" for digest in digests}) > 1


def _with_peft_section(identity: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded keys with `model.peft` in the place of a section that older versions had for its type."""
    keys = dict(identity)
    for name in [entry.name for entry in PEFT_TYPES if entry.former_keys]:
        prefix = f"model.{name}."
        section = {key.removeprefix(prefix): json.loads(keys.pop(key)) for key in identity if key.startswith(prefix)}
        if keys.pop(f"model.{name}", "null") != "null":
            adapter = former_adapter(name, section)
            texts = {key: format_json(adapter[key], sort_keys=True) for key in adapter}
            keys |= {"model.peft": "written", "model.peft.type": texts["type"], "model.peft.values": texts["values"]}
    return keys


def refuse_existing_checkpoint(newest: Path | None) -> None:
    """Raise CheckpointError if there is a checkpoint although `checkpoint.resume` is `never`."""
    if newest is not None:
        raise CheckpointError(
            f"checkpoint.resume is `never`, but {newest} exists. "
            "Write `auto` to resume from it, or another run.folder to start from scratch."
        )


def setting_differences(saved: Mapping[str, str], current: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the saved and current values that differ; for an added or removed section, only its own name.

    >>> setting_differences({"lora": "written", "lora.rank": "8"}, {"lora": "null"})
    {'lora': ('written', 'null')}
    """
    names = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return {name: (saved.get(name, ABSENT), current.get(name, ABSENT)) for name in outermost}


def _difference(name: str, values: tuple[str, str]) -> str:
    saved, current = values
    return f"{name}: {_shorten(saved)} in the checkpoint, {_shorten(current)} in this run"


def _arrows(changes: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} {_shorten(saved)} -> {_shorten(current)}" for name, (saved, current) in changes.items())


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
