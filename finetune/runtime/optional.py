"""Optional packages, lazy imports and a no-op callback. Imports no torch.

    with lazily():
        from finetune.model.adapters import build

This is a regular import statement, so type checker, linter and the architecture tests see it. It binds a lazy module:
`build.add_adapter(...)` imports it (like PEP 810's `lazy import`). A job then spends time and memory only on the
modules that it uses: plain fine-tuning never imports peft.

The standard library's `importlib.util.LazyLoader` does not keep these promises (seen with Python 3.11.7). Two threads
that use a module at the same time see it partially imported (https://github.com/python/cpython/issues/114763). Parent
packages are imported at once, which for `from peft.tuners import lora` is peft, and a missing package raises at the
statement. Lazy modules stay in `sys.modules`, where code that looks at all of them, such as `inspect.getmodule`,
imports them.
"""

import atexit
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from threading import get_ident
from types import ModuleType
from typing import Any

from finetune.errors import MissingPackage
from finetune.runtime.text.standard_streams import exit_on_interrupt_while_importing

_NEVER = 0
"""The garbage collector's first threshold while a command imports. With Python's default of 700, collection takes a
quarter of the time, and with 50,000 an eighth, to find 9,000 garbage objects among 650,000."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`; raises MissingPackage that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise
        raise MissingPackage(
            f"{purpose} needs the package `{module.split('.')[0]}`, which is not installed. "
            f"Install it with: pip install 'finetune-accelerate[{extra}]'"
        ) from error


def no_op(*_: object) -> None:
    """Do nothing: the default of optional callbacks."""


@contextmanager
def lazily(*, freeze: bool = False) -> Iterator[None]:
    """Make the import statements of this block, in this thread, bind modules that are imported when first used.

    Write `from package import module` (never a class or function, which would have to be looked up now), and `import
    package.module as module` if the package itself imports lazily, as transformers does. `freeze` is for a command,
    which imports nearly all that the process will use: garbage collection is disabled during the import and later
    skips those objects.
    """
    finder = _LazyFinder(freeze=freeze)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in finder.modules:  # other imports are not lazy
            parent, _, name = module.__name__.rpartition(".")
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            if parent in sys.modules and vars(sys.modules[parent]).get(name) is module:
                delattr(sys.modules[parent], name)
        for module in finder.modules:
            module.is_bound = True


class _LazyModule(ModuleType):
    """A proxy of a module, which is imported at the first attribute lookup."""

    def __init__(self, name: str, *, freeze: bool) -> None:
        super().__init__(name)
        self._freeze = freeze
        self.is_bound = False  # it has no attributes until its block has ended

    def __getattr__(self, name: str) -> Any:
        if name in ("_freeze", "is_bound") or not self.is_bound:
            raise AttributeError(name)
        real = sys.modules.get(self.__name__)
        if real is not None and real is not self:
            return getattr(real, name)
        if not self._freeze:
            return getattr(importlib.import_module(self.__name__), name)
        thresholds = gc.get_threshold()
        gc.set_threshold(_NEVER, *thresholds[1:])
        try:
            with exit_on_interrupt_while_importing():
                real = importlib.import_module(self.__name__)
        finally:
            gc.freeze()  # modules live as long as the process; forked processes share objects that are not written to
            # The last collection frees triton's objects: nanobind prints a page about each that is left at exit.
            atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else None)
            gc.set_threshold(*thresholds)
        return getattr(real, name)


class _LazyFinder(MetaPathFinder, Loader):
    """Finds lazy modules for all imports of its thread."""

    def __init__(self, *, freeze: bool) -> None:
        self._freeze = freeze
        self._thread = get_ident()
        self.modules: list[_LazyModule] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for any module; None in other threads, whose imports are ordinary."""
        return ModuleSpec(name, self, is_package=True) if get_ident() == self._thread else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the lazy module."""
        module = _LazyModule(spec.name, freeze=self._freeze)
        self.modules.append(module)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""
