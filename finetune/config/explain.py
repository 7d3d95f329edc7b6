"""A config as it was run: every value, and where it came from."""

import json
from collections.abc import Iterator
from typing import Any

from finetune.config.load import LoadedConfig
from finetune.config.rules.effects import idle_keys
from finetune.config.run_config import with_run_folder
from finetune.config.section import Section
from finetune.config.source import Sources, joined
from finetune.runtime.redact import redacted_config
from finetune.runtime.terminal import neutral

COLUMN = 56
"""Where the sources begin, if the value leaves room."""


def resolved_yaml(loaded: LoadedConfig) -> str:
    """Return the whole config as YAML, every value with its source behind it: file and line, override, or default.

    Read as a job, it gives the same config: keys that do nothing in this combination stand in comments.
    """
    head = f"# {neutral(loaded.path.name)} as it was run, with the source of every value. Paths are absolute."
    config = loaded.config if loaded.remote is None else with_run_folder(loaded.config, loaded.remote)
    lines = _lines(config, loaded.sources, prefix="", idle=idle_keys(config))
    return "\n".join([head, *lines]) + "\n"


def _lines(section: Section, sources: Sources, *, prefix: str, idle: frozenset[str]) -> Iterator[str]:
    indent = "  " * (prefix.count(".") + 1 if prefix else 0)
    for name in type(section).model_fields:
        value, key = getattr(section, name), joined(prefix, name)
        if isinstance(value, Section):
            inner = list(_lines(value, sources, prefix=key, idle=idle))
            is_all_comment = all(line.lstrip().startswith("#") for line in inner)
            yield f"{indent}{name}:{' {}' if is_all_comment else ''}"
            yield from inner
        elif key in idle:
            yield f"{indent}# {name}: {_written(name, value)}  (no effect here)"
        else:
            yield f"{f'{indent}{name}: {_written(name, value)}':<{COLUMN}}  # {_source(key, sources)}"


def _source(key: str, sources: Sources) -> str:
    source = sources.get(key)
    if source is None:
        return "default"
    return neutral(str(source)) if source.line is not None else "--set"


def _written(name: str, value: Any) -> str:
    """Return the value as YAML 1.2 on one line, without secrets: JSON, but for escapes of what acts on a terminal."""
    plain = json.loads(json.dumps(value, default=_as_written))
    return neutral(json.dumps(redacted_config(plain, name=name), ensure_ascii=False))


def _as_written(section: Section) -> dict[str, Any]:
    """Return the keys of a section in a list: its defaults are not told."""
    return section.model_dump(exclude_unset=True)
