"""Which keys the user really asked for."""

from typing import Any

from finetune.config.section import Section


def is_written(config: Section, key: str) -> bool:
    """Tell whether the dotted key was written and asks for something: `null`, `false` and empty lists do not."""
    section, name = _inside(config, key)
    if section is None or name not in section.model_fields_set:
        return False
    value = getattr(section, name)
    return not (value is None or value is False or value in ((), {}))


def exists(config: Section, key: str) -> bool:
    """Tell whether the dotted key has a place: no section on the way to it is null."""
    return _inside(config, key)[0] is not None


def _inside(config: Section, key: str) -> tuple[Section | None, str]:
    *sections, name = key.split(".")
    place: Any = config
    for part in sections:
        place = place[int(part)] if isinstance(place, tuple) else getattr(place, part)
        if place is None:
            return None, name
    return place, name
