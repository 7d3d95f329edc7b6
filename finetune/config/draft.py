"""A config of which some keys are wrong, so that the rules can still be asked about the keys that are right."""

from collections.abc import Iterator, Mapping, Set
from typing import Any, TypeVar, cast, get_args

from finetune.config.section import Section
from finetune.config.source import ancestors, joined

S = TypeVar("S", bound=Section)


def draft(kind: type[S], values: Mapping[str, Any], *, broken: Set[str]) -> S:
    """Return a section without its broken keys: reading one of them raises AttributeError.

    `broken` are dotted keys as they stand in the file; keys that are not written have their defaults.
    """
    outer = broken | {each for key in broken for each in ancestors(key)}
    return _drafted(kind, values, broken=broken, outer=outer, prefix="")


def _drafted(kind: type[S], values: Mapping[str, Any], *, broken: Set[str], outer: Set[str], prefix: str) -> S:
    """Return the section at the prefix; `outer` are the broken keys, and those of the sections around them."""
    made: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        key = joined(prefix, name)
        if key in broken or (name not in values and field.is_required()):
            continue
        if name not in values:
            made[name] = field.get_default(call_default_factory=True)
            continue
        value = values[name]
        inner = next(_sections(field.annotation), None)
        if isinstance(value, dict) and inner is not None:
            made[name] = _drafted(inner, value, broken=broken, outer=outer, prefix=key)
        elif isinstance(value, list) and inner is not None and all(isinstance(each, dict) for each in value):
            places = [joined(key, number) for number in range(len(value))]
            made[name] = tuple(
                _drafted(inner, each, broken=broken, outer=outer, prefix=place)
                for each, place in zip(value, places, strict=True)
            )
        elif key not in outer:
            made[name] = tuple(value) if isinstance(value, list) else value
    section = cast(S, kind.model_construct(_fields_set=set(values) & set(made), **made))
    for name in kind.model_fields.keys() - made.keys():
        section.__dict__.pop(name, None)
    return section


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)
