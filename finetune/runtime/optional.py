"""Packages that may be missing, and packages that are slow to import: the one place that imports inside a function."""

import importlib
from types import ModuleType

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
