"""What changed since the run that wrote a checkpoint, and which changes a resumed run refuses. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.config.sections.checkpoint import NEVER_ALLOWED
from finetune.errors import CheckpointError
from finetune.runtime.text.redact import comparable_config

ABSENT = "nothing"
_MAX_LENGTH = 80

CAUSES: Mapping[str, tuple[str, ...]] = {
    "training data": (
        *("data.train.", "data.max_length", "data.over_length", "data.truncate_side", "data.no_target"),
        *("data.system_prompt", "data.train_on", "data.batching."),
        *("data.validation.fraction", "data.validation.hash_fraction", "data.validation.exclude_from_train"),
    ),
    "tokenizer": ("model.tokenizer", "data.chat_template"),
}
"""Settings that may be why a digest differs, by the beginnings of their names."""


def check_changes(path: Path, saved: RunFingerprint, *, wanted: RunFingerprint, allowed: Sequence[str]) -> list[str]:
    """Return sentences about what has changed since the checkpoint; raises CheckpointError for what must not have.

    What alters the maths has to be in `allowed`; a name there that has not changed is told as well.
    """
    identity = differences(comparable_config(saved.identity), wanted.identity)
    settings = differences(comparable_config(saved.settings), wanted.settings)
    refused = {name: pair for name, pair in identity.items() if name not in allowed or name in NEVER_ALLOWED}
    if refused:
        wished = [name for name in identity if name in allowed]
        raise CheckpointError(_refusal(path, refused, settings=settings, already_allowed=wished))
    sentences = []
    if identity:
        sentences.append(f"changed since the checkpoint, as checkpoint.allow_changes says: {_arrows(identity)}")
    if settings:
        sentences.append(f"changed since the checkpoint: {_arrows(settings)}")
    idle = [name for name in allowed if name not in identity]
    if idle:
        sentences.append(f"checkpoint.allow_changes: nothing to allow, as in the checkpoint: {', '.join(idle)}")
    return sentences


def refuse_existing_checkpoint(newest: Path | None) -> None:
    """Raise CheckpointError where there is a checkpoint although the run is never to continue."""
    if newest is not None:
        raise CheckpointError(
            f"checkpoint.resume: never, but there is {newest}. "
            "Write `auto` to continue from it, or another run.folder to start anew."
        )


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return what differs, with the value there and here; of a section that came or went only its own name.

    >>> differences({"lora": "written", "lora.rank": "8"}, {"lora": "null"})
    {'lora': ('written', 'null')}
    """
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return {name: (there.get(name, ABSENT), here.get(name, ABSENT)) for name in outermost}


def _refusal(
    path: Path,
    refused: Mapping[str, tuple[str, str]],
    *,
    settings: Mapping[str, tuple[str, str]],
    already_allowed: Sequence[str],
) -> str:
    lines = [f"{path} was written by a run that learns otherwise"]
    for name, (there, here) in refused.items():
        lines.append(f"  {name}: {_shorten(there)} there, {_shorten(here)} here")
        causes = [key for key in settings if name in CAUSES and key.startswith(CAUSES[name])]
        lines += [f"    {key}: {_shorten(settings[key][0])} there, {_shorten(settings[key][1])} here" for key in causes]
    never = [name for name in refused if name in NEVER_ALLOWED]
    if never:
        lines += [f"{name} cannot be changed: {NEVER_ALLOWED[name]}." for name in never]
        lines.append("Restore what is there, or write another run.folder to start anew.")
    else:
        lines.append("To go back, restore what is there. To go on with the change, write")
        lines.append(f"  checkpoint.allow_changes: [{', '.join(dict.fromkeys([*already_allowed, *refused]))}]")
    return "\n".join(lines)


def _arrows(changes: Mapping[str, tuple[str, str]]) -> str:
    return ", ".join(f"{name} {_shorten(there)} -> {_shorten(here)}" for name, (there, here) in changes.items())


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
