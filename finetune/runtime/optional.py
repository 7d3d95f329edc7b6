"""Packages that may be missing, modules that are imported when first used, callbacks not given. Imports no torch.

    with lazily():
        from finetune.model.adapters import build

The statement is a real one, so type checker, linter and the tests of the architecture see it. What it binds is the
module, not yet imported: `build.add_adapter(...)` imports it (PEP 810's `lazy import`, until Python has it). A job then
pays, in seconds and in memory, only for what it uses: plain fine-tuning never imports peft.

The standard library's `importlib.util.LazyLoader` does not keep these promises (seen with Python 3.11.7). Two threads
that use a module at the same time see it half imported (https://github.com/python/cpython/issues/114763). Parent
packages are imported at once, which for `from peft.tuners import lora` is peft, and a missing package raises at the
statement. Lazy modules stay in `sys.modules`, where code that looks at all of them, such as `inspect.getmodule`,
imports them.
"""

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
"""The garbage collector's first threshold while a command imports. With Python's own 700, collecting takes a quarter of
the time, and with 50,000 an eighth, to find 9,000 objects among the 650,000 that stay."""


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import and return `module`; raises MissingPackage that names the extra which installs it."""
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
    """Do nothing: a callback that nobody needs."""


@contextmanager
def lazily(*, freeze: bool = False) -> Iterator[None]:
    """Have the import statements of this block, in this thread, bind modules that are imported when first used.

    Write `from package import module` (never a class or function: it would have to be looked up now), and `import
    package.module as module` where the package imports what is looked up in it, as transformers does. `freeze` is for
    a command, which imports nearly all that the process will ever use: the garbage collector does not run meanwhile and
    never visits those objects again.
    """
    finder = _LazyFinder(freeze=freeze)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        finder.clean_up()


class _LazyModule(ModuleType):
    """A proxy of a module, which is imported when an attribute is looked up; lookups are passed on to it."""

    def __init__(self, name: str, *, freeze: bool) -> None:
        super().__init__(name)
        self._freeze = freeze
        self._is_bound = False  # until its block has ended, it has no attributes

    def __getattr__(self, name: str) -> Any:
        if name in ("_freeze", "_is_bound") or not self._is_bound:
            raise AttributeError(name)
        real = sys.modules.get(self.__name__)
        return getattr(self._import() if real is None or real is self else real, name)

    def _import(self) -> ModuleType:
        if not self._freeze:
            return importlib.import_module(self.__name__)
        usual = gc.get_threshold()
        gc.set_threshold(_NEVER, *usual[1:])
        try:
            with exit_on_interrupt_while_importing():
                return importlib.import_module(self.__name__)
        finally:
            gc.freeze()  # modules last as long as the process; forked processes share objects that nobody writes to
            gc.set_threshold(*usual)


class _LazyFinder(MetaPathFinder, Loader):
    """Finds every module that is imported in its thread, as one that is not imported yet."""

    def __init__(self, *, freeze: bool) -> None:
        self._freeze = freeze
        self._thread = get_ident()
        self._modules: list[_LazyModule] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for any module; None in other threads, whose imports are ordinary."""
        return ModuleSpec(name, self, is_package=True) if get_ident() == self._thread else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the lazy module."""
        module = _LazyModule(spec.name, freeze=self._freeze)
        self._modules.append(module)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing."""

    def clean_up(self) -> None:
        """Leave no trace where modules are looked up, so that any other import is an ordinary one."""
        for module in self._modules:
            parent, _, name = module.__name__.rpartition(".")
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]
            if parent in sys.modules and vars(sys.modules[parent]).get(name) is module:
                delattr(sys.modules[parent], name)
        for module in self._modules:
            module._is_bound = True
