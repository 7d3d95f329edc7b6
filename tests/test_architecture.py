"""The house stands as docs and style say: who may import whom, how large a room may be. Plain `ast`, nothing is run."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "finetune"

BASE = {"errors", "runtime", "config.section", "config.sections"}
WINGS = ("data", "model", "strategy", "checkpoint", "report")

PRINTING = {"runtime.redact", "runtime.secret_urls", "runtime.terminal"}
"""What makes text fit to be printed and written down; it imports nothing slow."""

MAY_IMPORT: dict[str, set[str]] = {
    "__main__": {"cli"},
    "cli": {"run", "advise", "export", "launch", "recipes", "config", "errors", *PRINTING},
    "run": {"train", "task", "export", *WINGS, "config", "runtime", "errors"},
    "train": {"task", *WINGS, "config", "runtime", "errors"},
    "advise": {"run", "task", *WINGS, "config", "runtime", "errors"},
    "task": {"data", *BASE},
    "export": {"model", *BASE},
    **dict.fromkeys(WINGS, BASE),
    "recipes": {"runtime", "errors"},
    "config": {"errors", "runtime.lazy", *PRINTING},
    "runtime": {"errors"},
    "launch": {"errors"},
    "errors": set(),
}
"""From each folder to what it may import; its own folder always. A folder that is missing here is not allowed."""

ONLY_IN: dict[str, tuple[str, ...]] = {
    "accelerate": ("run", "train", "strategy", "checkpoint", "runtime.ranks", "report.trackers"),
    "peft": ("model", "export"),
}
"""Packages that only these places import."""

THROUGH_OPTIONAL = (
    *("sklearn", "deepspeed", "tensorboard", "wandb", "mlflow", "trackio", "bitsandbytes", "s3fs", "gcsfs", "adlfs"),
    "lm_eval",
)
"""Packages that may be missing: only `runtime/optional.py` imports them, by name."""

WITHOUT_TORCH = ("config", "cli", "launch", "recipes", "errors", "__main__")
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "numpy", "deepspeed"}

IMPORTS_INSIDE_FUNCTIONS = {
    "finetune/runtime/optional.py": "packages that may be missing",
    "finetune/runtime/optional.py": "modules that a job may not need",
    "finetune/cli/lazy.py": "commands that need torch",
    "finetune/task/generation/evaluation.py": "a metric that the user names as package.module:function",
}
"""The only files that import by name while they run, and what."""

BY_NAME = ("import_module", "__import__")

BANNED_NAMES = ("utils", "util", "helpers", "helper", "common", "misc", "manager")
LONGEST_FILE, LONGEST_FUNCTION = 250, 40


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"))

    @property
    def file(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        """Its name without `finetune.`: `config.load`, `run` for `run/__init__.py`, empty for the package itself."""
        parts = self.path.relative_to(PACKAGE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full name of everything imported anywhere in the file."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.file}:{node.lineno}: write the import absolutely"
                found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        return found

    @property
    def own_imports(self) -> list[tuple[int, str]]:
        """The imports of this package's own modules, without `finetune.`."""
        return [(line, name.removeprefix("finetune.")) for line, name in self.imports if name.startswith("finetune.")]


MODULES = {module.name: module for path in sorted(PACKAGE.rglob("*.py")) if (module := Module(path))}


def module_of(imported: str) -> str:
    """Return the module in which an imported name is defined: `config.load.load_config` is in `config.load`."""
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported


def is_within(name: str, places: tuple[str, ...] | set[str]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


each_module = pytest.mark.parametrize("module", MODULES.values(), ids=lambda module: module.file)


def test_the_whole_package_was_read():
    assert len(MODULES) > 60
    assert {"errors", "config.load", "cli.app", "data.order", "task.protocol"} <= MODULES.keys()
    assert sum(len(module.imports) for module in MODULES.values()) > 300


@each_module
def test_imports_run_down(module):
    assert module.name == "" or module.folder in MAY_IMPORT, (
        f"{module.file}: give the folder `{module.folder}` a floor: add it to MAY_IMPORT and to the design"
    )
    allowed = MAY_IMPORT.get(module.folder, set()) | {module.folder}
    for line, name in module.own_imports:
        place = module_of(name)
        assert place == "" or is_within(place, allowed), (
            f"{module.file}:{line} imports finetune.{place}, but `{module.folder}` may import only "
            f"{', '.join(sorted(allowed))}. Pass the thing in as an argument, or move it to a lower floor"
        )


@pytest.mark.parametrize("wing", WINGS)
def test_a_wing_knows_no_other_wing(wing):
    others = tuple(other for other in WINGS if other != wing)
    for module in (each for each in MODULES.values() if each.folder == wing):
        for line, name in module.own_imports:
            assert not is_within(name, others), f"{module.file}:{line}: wings meet in run/ only; pass it in from there"


def test_no_module_imports_itself_in_a_circle():
    graph = {name: {module_of(each) for _, each in module.own_imports} - {""} for name, module in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        pytest.fail(f"{circle}: move what both need into a module below both")


def test_the_folders_of_a_wing_do_not_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for name, module in MODULES.items():
        folder = inner_folder(name)
        others = {inner_folder(module_of(each)) for _, each in module.own_imports}
        graph.setdefault(folder, set()).update(other for other in others if other.count(".") and other != folder)
    assert {"data.order", "data.prepared", "data.sources"} <= graph.keys()
    try:
        list(TopologicalSorter({folder: others for folder, others in graph.items() if "." in folder}).static_order())
    except CycleError as error:
        pytest.fail(f"{' -> '.join(reversed(error.args[1]))}: put what both need into a folder below both")


def inner_folder(name: str) -> str:
    """Return the folder of a module: `data.order` for `data.order.packing`, `data` for `data.rows`."""
    return name if (PACKAGE / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]


@each_module
def test_some_packages_are_met_in_some_places_only(module):
    for line, name in module.imports:
        package = name.partition(".")[0]
        places = ONLY_IN.get(package)
        assert places is None or is_within(module.name, places), (
            f"{module.file}:{line}: only {', '.join(places)} import {package}; ask one of them for what you need"
        )
        assert package not in THROUGH_OPTIONAL, (
            f"{module.file}:{line}: {package} may be missing; get it with finetune.runtime.optional.require"
        )


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_the_command_line_starts_without_torch(folder):
    roots = {name for name, module in MODULES.items() if module.folder == folder}
    for name in sorted(reachable(roots)):
        for line, imported in MODULES[name].imports:
            assert imported.partition(".")[0] not in HEAVY, (
                f"{MODULES[name].file}:{line} imports {imported} and is imported by {folder}: "
                "name the function to cli/lazy.py instead, or split the file"
            )


def reachable(roots: set[str]) -> set[str]:
    """Return the modules that importing the roots imports, their packages' `__init__` included."""
    seen: set[str] = set()
    pending = set(roots)
    while pending:
        name = pending.pop()
        seen.add(name)
        imported = {module_of(each) for _, each in MODULES[name].own_imports}
        parents = {name.rpartition(".")[0]} if "." in name else set()
        pending |= (imported | parents) - seen
    return seen


@each_module
def test_only_the_top_floors_know_the_whole_config(module):
    if module.folder in ("config", "run", "cli", "advise"):
        return
    for node in ast.walk(module.tree):
        names = {getattr(node, key, None) for key in ("id", "attr", "name")}
        assert "RunConfig" not in names, (
            f"{module.file}:{getattr(node, 'lineno', '?')}: take the section that you need, not the RunConfig"
        )


@each_module
def test_imports_stand_at_the_top_of_a_file(module):
    for function in functions(module):
        for node in ast.walk(function):
            assert not isinstance(node, ast.Import | ast.ImportFrom), (
                f"{module.file}:{node.lineno}: import at the top of the file, "
                "or with finetune.runtime.optional.require where the package may be missing"
            )
    for node in ast.walk(module.tree):
        is_import = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith(BY_NAME)
        assert not is_import or module.file in IMPORTS_INSIDE_FUNCTIONS, (
            f"{module.file}:{node.lineno}: importing by name is the business of {', '.join(IMPORTS_INSIDE_FUNCTIONS)}"
        )


def lazy_imports() -> list[tuple[Module, ast.stmt]]:
    """Return the statements in `with lazily():` blocks, with the file that holds them."""
    return [
        (module, statement)
        for module in MODULES.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.With) and ast.unparse(node.items[0].context_expr) == "lazily()"
        for statement in node.body
    ]


def test_what_is_imported_lazily_is_a_module():
    found = lazy_imports()
    assert len(found) >= 4
    for module, statement in found:
        assert isinstance(statement, ast.ImportFrom), (
            f"{module.file}:{statement.lineno}: write `from package import module`"
        )
        for alias in statement.names:
            name = f"{statement.module}.{alias.name}"
            assert not name.startswith("finetune.") or name.removeprefix("finetune.") in MODULES, (
                f"{module.file}:{statement.lineno}: {name} is no module: it would have to be looked up at once"
            )


GUARDED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "rich.console.Console": ("runtime.drawing",),
    "rich.progress.Progress": ("runtime.drawing",),
    "rich.progress.TextColumn": (),
    "rich.print": (),
    "typer.echo": (),
    "typer.secho": (),
    "traceback.print_exc": (),
    "traceback.print_exception": (),
    "sys.__stdout__": (),
    "sys.__stderr__": (),
    "sys.stdout.write": (),
    "sys.stderr.write": (),
    "sys.stdout.buffer": (),
    "sys.stderr.buffer": (),
    "os.write": ("runtime.signals",),  # a line of its own, in a signal handler
}
"""Ways round the guarded streams, and the modules that may go them: `print` and ForeignTextConsole are for the rest."""


@each_module
def test_what_is_printed_goes_through_the_guarded_streams(module):
    names = {name.rpartition(".")[2]: name for _, name in module.imports if name in GUARDED_ELSEWHERE}
    for node in ast.walk(module.tree):
        used = ast.unparse(node.func if isinstance(node, ast.Call) else node) if is_use(node) else ""
        way = names.get(used, used)
        assert way not in GUARDED_ELSEWHERE or is_within(module.name, GUARDED_ELSEWHERE[way]), (
            f"{module.file}:{getattr(node, 'lineno', '?')} prints with {way}, past what takes secrets and escapes out: "
            "use print, or finetune.runtime.text.rich_console.SafeConsole"
        )


def is_use(node: ast.AST) -> bool:
    """Tell whether the node may be one of these ways, by its last name alone."""
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else getattr(node, "attr", None)
    return any(way.endswith(f".{name}") for way in GUARDED_ELSEWHERE)


def test_every_command_prints_to_guarded_streams():
    commands = [
        (group, function)
        for module in MODULES.values()
        if module.folder == "cli"
        for function in functions(module)
        for group in [[ast.unparse(each) for each in function.decorator_list]]
        if "reported" in group or any(each.endswith(".command()") for each in group)
    ]
    assert len(commands) > 15
    for decorators, function in commands:
        assert decorators[-1] == "reported", f"cli: {function.name}: decorate it with `reported`, innermost"


EXACT_JSON = (
    *("runtime.terminal", "config.changes", "config.explain"),
    *("data.formats.row_template", "data.encoding.drops", "data.sources.splits"),
)
"""Where JSON is compared, digested or trained on, and shown to nobody."""


@each_module
def test_json_that_people_read_is_made_by_one_function(module):
    """`json.dumps(ensure_ascii=False)` leaves characters raw that reorder text: on a screen they lie."""
    if is_within(module.name, EXACT_JSON):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
            raw = [each for each in node.keywords if each.arg == "ensure_ascii"]
            assert not raw, f"{module.file}:{node.lineno}: use finetune.runtime.text.terminal.format_json"


@each_module
def test_there_is_no_type_checking_escape(module):
    for node in ast.walk(module.tree):
        assert "TYPE_CHECKING" not in {getattr(node, key, None) for key in ("id", "attr", "name")}, (
            f"{module.file}:{getattr(node, 'lineno', '?')}: import what you need; if that makes a circle, "
            "move what both need into a module below both"
        )


@each_module
def test_rooms_are_small(module):
    length = len(module.path.read_text(encoding="utf-8").splitlines())
    assert length <= LONGEST_FILE, f"{module.file} has {length} lines: split it by what its parts are about"
    for function in functions(module):
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= LONGEST_FUNCTION, (
            f"{module.file}:{function.lineno} {function.name} has {length} lines: name its parts as functions"
        )


@each_module
def test_a_file_is_named_after_what_is_in_it(module):
    for part in module.name.split("."):
        assert part.lower() not in BANNED_NAMES, f"{module.file}: `{part}` says nothing; name what is in it"


def lazy_places() -> list[tuple[str, str]]:
    """Return the places that the command line imports when they are called, with the file that names them."""
    places = []
    for module in (each for each in MODULES.values() if each.folder == "cli"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy.call":
                place = node.args[0]
                assert isinstance(place, ast.Constant), f"{module.file}:{node.lineno}: write the place as plain text"
                places.append((module.file, str(place.value)))
    return places


def test_what_the_command_line_calls_is_there():
    places = lazy_places()
    assert len(places) >= 4
    for file, place in places:
        name, _, function = place.removeprefix("finetune.").partition(":")
        assert is_within(name, MAY_IMPORT["cli"] | {"cli"}), f"{file}: {place} is not for the command line to call"
        assert name in MODULES, f"{file}: there is no module for {place}"
        assert function in {each.name for each in MODULES[name].tree.body if isinstance(each, ast.FunctionDef)}, (
            f"{file}: there is no function for {place}"
        )


def test_a_key_its_section_its_folder_and_its_tests_bear_one_name():
    sections = {path.stem for path in (PACKAGE / "config" / "sections").glob("*.py")} - {"__init__"}
    classes = [node for node in MODULES["config.run_config"].tree.body if isinstance(node, ast.ClassDef)]
    (run_config,) = [node for node in classes if node.name == "RunConfig"]
    keys = {node.target.id for node in run_config.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    assert keys == sections, "a top-level key and its file in config/sections bear the same name"
    for key in sorted(keys - {"evaluate"}):  # evaluation is a part of training: train/evaluate.py
        assert (PACKAGE / key).is_dir(), f"the section `{key}` has no folder finetune/{key}"
        assert (ROOT / "tests" / key).is_dir(), f"the section `{key}` has no folder tests/{key}"
