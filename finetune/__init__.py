"""Fine-tune transformer models on Hugging Face Accelerate: the same loss under every strategy.

The names of the Python API are imported when they are first used; `import finetune` itself imports no torch.
"""

import sys
from types import ModuleType
from typing import Any

from finetune.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiskError,
    ExportError,
    FinetuneError,
    Hang,
    HubError,
    LostContact,
    MissingPackage,
    ModelError,
    NonFiniteError,
    RegistryError,
    StrategyError,
    TrainingError,
    UserError,
)
from finetune.runtime.optional import lazily

with lazily():  # pydantic, and torch at the first call
    from finetune import register as _register
    from finetune.api import commands as _commands
    from finetune.api import job as _job
    from finetune.api import session as _session
    from finetune.api import training as _training
    from finetune.run.state import finished as _finished

__version__ = "0.2.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DiskError",
    "ExportError",
    "FinetuneError",
    "Hang",
    "HubError",
    "Job",
    "LostContact",
    "MissingPackage",
    "ModelError",
    "NonFiniteError",
    "RegistryError",
    "RunResult",
    "Session",
    "StrategyError",
    "TrainingError",
    "UserError",
    "__version__",
    "check",
    "evaluate",
    "export",
    "generate",
    "load_job",
    "prepare",
    "register",
    "train",
]

_HOMES = {
    "Job": _job,
    "RunResult": _finished,
    "Session": _session,
    "check": _commands,
    "evaluate": _commands,
    "export": _commands,
    "generate": _commands,
    "load_job": _job,
    "prepare": _commands,
    "train": _training,
}
"""The modules of the names that are imported when they are first used."""


class _Package(ModuleType):
    """The package: `finetune.train` and `finetune.export` are the functions, whatever is imported from the folders.

    The import system binds a subpackage to its name in the package; `from finetune.train import loop` does not need it.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name == "register":
        return _register
    if name not in _HOMES:
        raise AttributeError(f"module `finetune` has no attribute `{name}`")
    return getattr(_HOMES[name], name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
