"""The version of a job file's keys, the keys that were renamed, and sections that became `model.peft`.

Renamed keys work for two more minor versions.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.section import KeyLocation
from finetune.errors import Problem, RenamedKeyWarning
from finetune.registry.model_choices import PEFT_TYPES, former_adapter
from finetune.runtime.text.terminal import format_json

JOB_VERSION = 1
"""The version of the keys that this package reads; it increases only when old files would change their meaning."""

_MINOR_VERSIONS = 2


@dataclass(frozen=True)
class RenamedKey:
    """A key, or a section with all its keys, under its old and its new dotted name; no list is on the way to either."""

    old: str
    new: str
    since: str  # the version of this package that renamed it: `0.3`

    def warning(self, where: str) -> RenamedKeyWarning:
        """Return the warning for the old name at this location."""
        return RenamedKeyWarning(old=self.old, new=self.new, since=self.since, until=self.until, where=where)

    @property
    def until(self) -> str:
        """Return the version that no longer reads the old name."""
        major, minor = self.since.split(".")[:2]
        return f"{major}.{int(minor) + _MINOR_VERSIONS}"


RENAMED_KEYS: tuple[RenamedKey, ...] = ()
"""Remove an entry in the version that its `until` names. None was renamed so far."""


RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {"run.strategy": {"fsdp1": "fsdp2"}}
"""Values that older run folders have recorded, and their present names; a job is refused with them."""


def version_problem(values: Mapping[str, Any]) -> Problem | None:
    """Return a problem for a job of a newer version, and for `true`; the schema reports all other wrong values."""
    version = values.get("version")
    if version is True:  # which is equal to 1
        return Problem("version", f"`true` is not allowed. Write {JOB_VERSION}.")
    if not isinstance(version, int) or version <= JOB_VERSION:
        return None
    return Problem(
        "version",
        f"this job is written for version {version} of the keys, but this finetune reads version {JOB_VERSION}. "
        "Install the newest: pip install -U finetune-accelerate",
    )


def rename_keys(values: dict[str, Any], lines: dict[str, int], *, file: str) -> list[Problem]:
    """Give the renamed keys of a file their new names, in `values` and in `lines`, and warn about each.

    Returns a problem for a key that is written under both names.
    """
    problems = []
    for key in RENAMED_KEYS:
        section, name = _section_at(values, key.old.rpartition(".")[0]), key.old.rpartition(".")[2]
        if section is None or name not in section:
            continue
        target, new_name = _section_at(values, key.new.rpartition(".")[0], creates=True), key.new.rpartition(".")[2]
        if target is None:
            continue
        if new_name in target:
            message = f"it is the old name of `{key.new}`, which is also set. Remove `{key.old}`."
            problems.append(Problem(key.old, message, line=lines.get(key.old)))
            continue
        warnings.warn(key.warning(str(KeyLocation(file, lines.get(key.old)))), stacklevel=2)
        target[new_name] = section.pop(name)
        for old in [name for name in lines if name == key.old or name.startswith(f"{key.old}.")]:
            lines[f"{key.new}{old.removeprefix(key.old)}"] = lines.pop(old)
    return problems


def rename_recorded_values(values: dict[str, Any]) -> None:
    """Give the values of an older run folder their new names."""
    for key, new_names in RENAMED_VALUES.items():
        section, name = _section_at(values, key.rpartition(".")[0]), key.rpartition(".")[2]
        if section is not None and isinstance(written := section.get(name), str):
            section[name] = new_names.get(written, written)


def replace_former_adapters(values: dict[str, Any]) -> list[Problem]:
    """Write `model.peft` in the place of sections such as `model.ia3`; return a problem with the new line for each."""
    model, problems = _section_at(values, "model") or {}, []
    for name in [entry.name for entry in PEFT_TYPES if entry.former_keys and entry.name in model]:
        section = model.pop(name)
        if section is None:  # its former default, as in the resolved config of a run
            continue
        adapter = former_adapter(name, section if isinstance(section, dict) else {})
        model["peft"] = model.get("peft") or adapter
        message = f"the section is now a type of `model.peft`. Write `peft: {format_json(adapter)}` in its place."
        problems.append(Problem(f"model.{name}", message))
    return problems


def rename_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with the new names of renamed keys. Warns about each with a RenamedKeyWarning."""
    renamed = []
    for text in overrides:
        for key in RENAMED_KEYS:
            if re.match(rf"{re.escape(key.old)}[.=]", text):
                warnings.warn(key.warning(f"--set {key.old}"), stacklevel=2)
                text = f"{key.new}{text.removeprefix(key.old)}"
        renamed.append(text)
    return renamed


def _section_at(values: Any, key: str, *, creates: bool = False) -> dict[str, Any] | None:
    for part in key.split(".") if key else ():
        if creates and isinstance(values, dict):
            values.setdefault(part, {})
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None
