"""Makes the paths of a config absolute, so that they mean the same wherever the run is launched."""

import hashlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic.fields import FieldInfo

from finetune.config.formatting import truncate
from finetune.config.section import RelativeToConfig, Section, join_key
from finetune.errors import Problem
from finetune.runtime.text.redact import unsigned_url

S = TypeVar("S", bound=Section)

_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4095
_SHORT_NAME = 50  # characters kept of the last part of a URL that is too long for a file name


def with_absolute_paths(section: S, folder: pathlib.Path) -> S:
    """Return the section with every path in it, and in the sections inside it, resolved against the folder.

    The set of keys marked as written is unchanged. Works on a draft, too.
    """
    changed: dict[str, Any] = {}
    for name, value in section.__dict__.items():
        if isinstance(value, Section):
            inner: Any = with_absolute_paths(value, folder)
        elif isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
            inner = tuple(with_absolute_paths(item, folder) for item in value)
        else:
            inner = _resolved(value, type(section).model_fields[name], folder=folder)
        if inner is not value:
            changed[name] = inner
    written = set(section.model_fields_set)
    copy = section.model_copy(update=changed)
    copy.__pydantic_fields_set__.intersection_update(written)
    return copy


def path_problems(section: Section, folder: pathlib.Path, *, prefix: str = "") -> list[Problem]:
    """Return the problems of paths that cannot be resolved or are too long for a file system; works on a draft, too."""
    problems: list[Problem] = []
    for name, value in section.__dict__.items():
        inner = value if isinstance(value, tuple) else (value,)
        for number, item in enumerate(inner):
            key = join_key(prefix, name, number if isinstance(value, tuple) else "")
            if isinstance(item, Section):
                problems += path_problems(item, folder, prefix=key)
            elif fault := _path_error(item, type(section).model_fields[name], folder=folder):
                problems.append(Problem(key, fault))
    return problems


def is_path(name: str) -> bool:
    """Return whether a text that may be a name or a path is a path, i.e. begins with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def is_url(text: str) -> bool:
    """Return whether a text is a URL in object storage, such as `s3://bucket/runs/first`, and so not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def local_run_folder(folder: str, local_folder: str | None) -> pathlib.Path:
    """Return the folder of a run on this machine: `run.folder`, or the local folder of a run at a URL.

    The default for a URL is named after its last part and a digest of all of it, so the same job finds it again.
    """
    if not is_url(folder):
        return pathlib.Path(folder)
    if local_folder is not None:
        return pathlib.Path(local_folder)
    address = unsigned_url(folder).rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:12]
    last = address.rpartition("/")[2]
    if len(last.encode()) > _MAX_NAME_BYTES - len(digest) - 1:
        last = last[:_SHORT_NAME]
    return pathlib.Path("~/.cache/finetune/runs").expanduser() / f"{last}-{digest}"


def absolute_path(path: str, folder: pathlib.Path) -> str:
    """Return the path resolved against the folder; `~` is the home folder, `..` is resolved."""
    return os.path.normpath(folder / pathlib.Path(path).expanduser())


def _resolved(value: Any, field: FieldInfo, *, folder: pathlib.Path) -> Any:
    mark = next(_path_marks(field), None)
    if mark is not None and isinstance(value, tuple):
        return tuple(_resolved(item, field, folder=folder) for item in value)
    literals = (part for part in get_args(field.annotation) if get_origin(part) is Literal)
    choices = {choice for literal in literals for choice in get_args(literal)}
    if mark is None or not isinstance(value, str) or is_url(value) or value in choices:
        return value
    if mark.only_marked and not is_path(value):
        return value
    return absolute_path(value, folder)


def _path_error(value: Any, field: FieldInfo, *, folder: pathlib.Path) -> str | None:
    if not isinstance(value, str) or next(_path_marks(field), None) is None:
        return None
    if is_url(value):
        is_long = len(value.encode()) > _MAX_PATH_BYTES
        return f"the URL is longer than {_MAX_PATH_BYTES} bytes. Use a shorter one." if is_long else None
    try:
        path = os.fsencode(_resolved(value, field, folder=folder))
    except RuntimeError:
        return f"there is no home folder of `{truncate(value.partition('/')[0])}`. Write the path in full."
    longest = max(map(len, path.split(b"/")))
    if longest > _MAX_NAME_BYTES:
        return f"a name in this path has {longest:,} bytes; a file system allows {_MAX_NAME_BYTES}. Use a shorter one."
    if len(path) > _MAX_PATH_BYTES:
        return f"the path has {len(path):,} bytes; a file system allows {_MAX_PATH_BYTES}. Use a shorter one."
    return None


def _path_marks(field: FieldInfo) -> Iterator[RelativeToConfig]:
    """Yield the path markers of the field and of the members of its union."""
    pending: list[Any] = [*field.metadata, field.annotation]
    while pending:
        part = pending.pop()
        if isinstance(part, RelativeToConfig):
            yield part
        pending += [*get_args(part)] if get_origin(part) is not Literal else []
