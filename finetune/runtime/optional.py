"""Packages that may be missing, and modules that are imported when they are first used. Imports no torch.

    with lazily():
        from finetune.model.adapters import build

The statement is a real one, so type checker, linter and the tests of the architecture see it. What it binds is the
module, not yet imported: `build.add_adapter(...)` imports it (PEP 810's `lazy import`, until Python has it). A job
then pays, in seconds and in memory, only for what it uses: plain fine-tuning never imports peft.
"""

import builtins
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

from finetune.errors import MissingPackage


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`; raises MissingPackage that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingPackage(
            f"{purpose} needs the package `{module.split('.')[0]}`, which is not installed. "
            f"Install it with: pip install 'finetune[{extra}]'"
        ) from error


class _Later(ModuleType):
    """A module by name. Whatever is looked up in it is looked up in the real one, which is imported for that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


@contextmanager
def lazily() -> Iterator[None]:
    """Have the import statements of this block, in this thread, bind modules that are imported when first used.

    Write `from package import module` (never a class or function: it would have to be looked up now).
    """
    at_once, here = builtins.__import__, get_ident()

    def later(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if get_ident() != here:
            return at_once(name, globals, locals, fromlist or (), level)
        return SimpleNamespace(**{each: _Later(f"{name}.{each}") for each in fromlist or ()})

    builtins.__import__ = later
    try:
        yield
    finally:
        builtins.__import__ = at_once
