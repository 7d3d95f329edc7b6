"""Makes the paths of a config absolute, so that it means the same wherever the run is launched."""

import hashlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from finetune.config.section import RelativeToConfig, Section
from finetune.runtime.secret_urls import unsigned_url

S = TypeVar("S", bound=Section)


def with_absolute_paths(section: S, folder: pathlib.Path) -> S:
    """Return the section with every path in it, and in the sections inside it, resolved against the folder.

    Which keys are marked as written stays the same. Works on a draft, too.
    """
    changed: dict[str, Any] = {}
    for name, value in section.__dict__.items():
        if isinstance(value, Section):
            inner: Any = with_absolute_paths(value, folder)
        elif isinstance(value, tuple) and any(isinstance(each, Section) for each in value):
            inner = tuple(with_absolute_paths(each, folder) for each in value)
        else:
            inner = _resolved(value, type(section).model_fields[name], folder=folder)
        if inner is not value:
            changed[name] = inner
    written = set(section.model_fields_set)
    copy = section.model_copy(update=changed)
    copy.__pydantic_fields_set__.intersection_update(written)
    return copy


def is_path(name: str) -> bool:
    """Tell whether a text that may be a name or a path is a path: it begins with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def is_url(text: str) -> bool:
    """Tell whether a text names a place in object storage, such as `s3://bucket/runs/first`, and so is no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def stage_of(folder: str, local_folder: str | None) -> pathlib.Path:
    """Return where a run is written on this machine: its folder, or where it is staged when that is a URL.

    The default stage of a URL bears its last part and a digest of all of it, so the same job finds it again.
    """
    if not is_url(folder):
        return pathlib.Path(folder)
    if local_folder is not None:
        return pathlib.Path(local_folder)
    address = unsigned_url(folder).rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    return pathlib.Path("~/.cache/finetune/runs").expanduser() / f"{address.rpartition('/')[2]}-{digest}"


def absolute(path: str, folder: pathlib.Path) -> str:
    """Return the path resolved against the folder; `~` is the home folder, `..` is taken out."""
    return os.path.normpath(folder / pathlib.Path(path).expanduser())


def _resolved(value: Any, field: FieldInfo, *, folder: pathlib.Path) -> Any:
    mark = next(_parts(field, RelativeToConfig), None)
    if mark is None or not isinstance(value, str) or is_url(value) or value in _choices(field):
        return value
    if mark.only_marked and not is_path(value):
        return value
    return absolute(value, folder)


def _choices(field: FieldInfo) -> set[str]:
    return {choice for part in get_args(field.annotation) if get_origin(part) is Literal for choice in get_args(part)}


def _parts(field: FieldInfo, kind: type[RelativeToConfig]) -> Iterator[RelativeToConfig]:
    """Yield the marks of the field, and of the members of its union."""
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        if isinstance(part, kind):
            yield part
        pending += [*get_args(part)] if get_origin(part) is not Literal else []
