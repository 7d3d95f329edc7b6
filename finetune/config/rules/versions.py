"""What older versions wrote: the version of a job file's keys, and sections that became `model.peft`."""

from collections.abc import Mapping
from typing import Any

from finetune.errors import Problem
from finetune.registry.model_choices import PEFT_TYPES, former_adapter
from finetune.runtime.text.terminal import format_json

JOB_VERSION = 1
"""The version of the keys that this package reads; it increases only when old files would change their meaning."""


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


def rename_recorded_values(values: dict[str, Any]) -> None:
    """Give the values that an older run folder has recorded their present names; a job is refused with them."""
    run = values.get("run")
    if isinstance(run, dict) and run.get("strategy") == "fsdp1":
        run["strategy"] = "fsdp2"


def replace_former_adapters(values: dict[str, Any]) -> list[Problem]:
    """Write `model.peft` in the place of sections such as `model.ia3`; return a problem with the new line for each."""
    model, problems = values.get("model"), []
    if not isinstance(model, dict):
        return []
    for name in [entry.name for entry in PEFT_TYPES if entry.former_keys and entry.name in model]:
        section = model.pop(name)
        if section is None:  # its former default, as in the resolved config of a run
            continue
        adapter = former_adapter(name, section if isinstance(section, dict) else {})
        model["peft"] = model.get("peft") or adapter
        message = f"the section is now a type of `model.peft`. Write `peft: {format_json(adapter)}` in its place."
        problems.append(Problem(f"model.{name}", message))
    return problems
