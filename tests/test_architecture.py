"""The house stands as the design says: who may import whom, how large a file may be, which words its names are made of.

Plain `ast`, nothing is run. Each test lists every offender, and each line says what to do.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "finetune"

# What is allowed. Whole modules are written with their full name, folders of `finetune/` without it.

BASE = {"errors", "runtime", "registry", "finetune.config.section", "config.sections"}
WINGS = ("data", "model", "strategy", "checkpoint", "report")

PRINTING = {
    "finetune.runtime.text.redact",
    "finetune.runtime.text.standard_streams",
    "finetune.runtime.text.terminal",
}
"""What makes text fit to be printed and written down; it imports nothing slow."""

DOORS = {"commands", "run", "launch", "config", "registry", "errors", "finetune.runtime.optional", *PRINTING}
"""What both the command line and the Python API import."""

BELOW_RUN = {"memory", "train", "task", "export", *WINGS, "config", "registry", "runtime", "errors"}

MAY_IMPORT: dict[str, set[str]] = {
    "": {
        "api",
        "register",
        "errors",
        "finetune.runtime.optional",
        "finetune.run.state.finished",
    },  # the names of the API
    "__main__": {"cli"},
    "cli": set(DOORS),
    "api": {*DOORS, "finetune.runtime.processes"},
    "commands": {"run", "launch", "recipes", "migration", *BELOW_RUN},
    "migration": {"config", "registry", "runtime", "errors"},
    "run": BELOW_RUN,
    "memory": BELOW_RUN - {"memory"},
    "train": {"task", *WINGS, "config", "registry", "runtime", "errors"},
    "task": {"data", *BASE},
    "export": {"model", *BASE},
    **dict.fromkeys(WINGS, BASE),  # and so no wing another one
    "recipes": {"runtime", "errors"},
    "config": {"registry", "errors", "finetune.runtime.optional", "finetune.runtime.files.read", *PRINTING},
    "registry": {"errors"},
    "register": {"registry", "finetune.config.section", "errors"},
    "runtime": {"errors"},
    "launch": {"errors", "finetune.runtime.optional"},
    "errors": set(),
}
"""From each folder to what it may import; its own folder always. A folder that is missing here is not allowed."""

KNOW_THE_WHOLE_CONFIG = ("config", "run", "memory", "cli", "api", "commands")

ONLY_IN: dict[str, tuple[str, ...]] = {
    "accelerate": (
        "run",
        "memory",
        "train",
        "strategy",
        "checkpoint",
        "finetune.runtime.distributed",
        "finetune.report.trackers",
    ),
    "peft": ("model", "export"),
}
"""Packages that only these places import."""

THROUGH_OPTIONAL = (
    *("sklearn", "deepspeed", "tensorboard", "wandb", "mlflow", "trackio", "bitsandbytes", "s3fs", "gcsfs", "adlfs"),
    *("prometheus_client", "gguf", "llama_cpp", "ray"),
)
"""Packages that may be missing: only `runtime/optional.py` imports them, by name."""

WITHOUT_TORCH = ("config", "migration", "registry", "register", "api", "cli", "launch", "recipes", "errors", "__main__")
HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "numpy", "deepspeed"}

IMPORTS_BY_NAME = {
    "finetune/runtime/optional.py": "packages that may be missing, modules that a job may not need",
    "finetune/registry/table.py": "the implementation of an entry of a table",
    "finetune/registry/plugins.py": "a plugin that a job names",
    "finetune/task/generation.py": "a metric that the user names as package.module:function",
}
"""The only files that import by name while they run, and what."""

GUARDED_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "rich.console.Console": ("finetune.runtime.text.rich_console",),
    "rich.progress.Progress": ("finetune.runtime.text.rich_console",),
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
    "os.write": (
        "finetune.runtime.supervision.signals",  # a line of its own, in a signal handler
        "finetune.runtime.text.standard_streams",  # likewise
    ),
}
"""Ways round the guarded streams, and the modules that may go them: `print` and ForeignTextConsole are for the rest."""

EXACT_JSON = (
    *("finetune.runtime.text.terminal", "finetune.config.resume_keys", "finetune.config.explain"),
    *("finetune.config.formatting", "finetune.run.state.python_inputs", "finetune.commands.generate"),
    *("finetune.data.templates.row_template", "finetune.data.encoding.template_support"),
    "finetune.data.sources.slices",
)
"""Where JSON is compared, digested or trained on, and shown to nobody; elsewhere characters that reorder text lie."""

LONGEST_FILE, LONGEST_FUNCTION, LARGEST_FOLDER = 450, 60, 14

OTHER_TEST_FOLDERS = ("plugins", "benchmarks", "fuzz", "faults", "scenarios", "task_cases", "fake_gpu")
"""Folders of `tests/` that are not named after a folder of the package: they test the program as a whole."""

BANNED_FILES = ("utils", "util", "helpers", "helper", "common", "misc", "manager")

REFUSED_WORDS = {
    "lesson": "training_data",
    "lessons": "training_data",
    "say": "log",
    "announcer": "run_log",
    "told": "log, or format_*",
    "tell": "log, or format_*",
    "learnt": "trained, or target",
    "learns": "trained, or target",
    "taught": "attach_teacher",
    "knower": "scorer",
    "wish": "stop_request",
    "wishes": "stop_sources",
    "settle": "wait_for, resolve, ...",
    "settled": "by what is done",
    "settling": "by what is done",
    "hollow": "meta",
    "slab": "chunk",
    "latch": "deferred_check",
    "contest": "comparison",
    "contestant": "competitor",
    "waypoint": "fault_point",
    "waypoints": "heartbeat, fault_point",
    "shelf": "staging_buffer",
    "parcel": "transfer",
    "hiding": "masking",
    "manner": "sampling_params",
    "beforehand": "by what is done",
    "mend": "fix, or repair",
    "mends": "fix, or repair",
    "mended": "fixed, or repaired",
    "beside": "next to, or in addition to",
    "anew": "again",
    "whoever": "the thing's own name",
}
"""Home-made words, and the terms of the field.

No module, class, function, parameter, field, local variable or test has one among its words; no docstring, comment or
message either, but for those of WORDS_OF_SENTENCES.
"""

WORDS_OF_SENTENCES = {
    "say",
    "tell",
    "wish",
    "wishes",
    "settle",
    "hiding",
    "manner",
    "latch",
    "contest",
    "shelf",
    "parcel",
}
"""Those of the table that are plain English in a sentence."""

REFUSED_PHRASES = {
    "so many": "the number of",
    "be had": "be loaded, be read",
    "cannot be told": "cannot be distinguished, cannot be determined",
    "without a word": "without a message, unexpectedly",
}

RECORDED_KEYS = {"learnt": "finetune/data/template_check.py"}
"""Keys of files of earlier runs, by the module that writes them: `tests/test_recorded_names.py`."""

NOT_IN_TEST_NAMES = {
    "says": "logs, reports, names",
    "said": "logged, reported",
    "tells": "logs, reports",
    "behind": "after, in the background",
    "ahead": "prefetched, in advance",
    "apart": "separate, isolated",
    "dear": "slow, expensive",
}
RIDDLES = ("what", "whoever", "whatever", "it", "they", "or", "so")
"""A test's name stands alone in a log: it does not begin with one of these, its subject does."""


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def file(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def name(self) -> str:
        """Its full name: `finetune.config.load`, `finetune.run` for `run/__init__.py`."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def folder(self) -> str:
        """The folder or file of the package that it belongs to: `config`, `errors`; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Line and full name of everything imported anywhere in the file."""
        return [found for node in self.nodes for found in self._imported(node)]

    @cached_property
    def imports_at_once(self) -> list[tuple[int, str]]:
        """Those that are done when the file is imported: not within `with lazily():`."""
        later = {id(node) for statement in self.lazy_imports for node in ast.walk(statement)}
        return [found for node in self.nodes if id(node) not in later for found in self._imported(node)]

    @cached_property
    def lazy_imports(self) -> list[ast.stmt]:
        """The statements of its `with lazily():` blocks."""
        blocks = [each for each in self.nodes if isinstance(each, ast.With)]
        return [
            each
            for block in blocks
            if _unparsed(block.items[0].context_expr).startswith("lazily(")
            for each in block.body
        ]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    def at(self, node: ast.AST) -> str:
        """Return file and line of a node."""
        return f"{self.file}:{getattr(node, 'lineno', '?')}"

    def _imported(self, node: ast.AST) -> list[tuple[int, str]]:
        if isinstance(node, ast.Import):
            return [(node.lineno, alias.name) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{self.file}:{node.lineno}: write the import absolutely"
            return [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        return []


def _unparsed(node: ast.AST) -> str:
    return ast.unparse(node)


MODULES = {module.name: module for path in sorted(PACKAGE.rglob("*.py")) if (module := Module(path))}


def own(imports: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return line and module of those that are of this package: the module in which an imported name is defined."""
    return [(line, module_of(name)) for line, name in imports if name.startswith("finetune.")]


def module_of(imported: str) -> str:
    while imported and imported not in MODULES:
        imported = imported.rpartition(".")[0]
    return imported


def is_within(name: str, places: tuple[str, ...] | set[str]) -> bool:
    """Tell whether the module of this full name is one of the places or in one of these folders."""
    full = [place if place.startswith("finetune.") else f"finetune.{place}" for place in places]
    return any(name == place or name.startswith(f"{place}.") for place in full)


def none_of(*rules: Callable[[Module], Iterator[str]]) -> None:
    """Fail with every offense against the rules, of all modules."""
    offenses = [offense for rule in rules for module in MODULES.values() for offense in rule(module)]
    report(offenses)


def report(offenses: list[str]) -> None:
    if offenses:
        pytest.fail("\n".join(offenses), pytrace=False)


def test_the_whole_package_was_read():
    assert len(MODULES) > 60
    assert {"finetune.errors", "finetune.config.load", "finetune.cli.app", "finetune.task.protocol"} <= MODULES.keys()
    assert sum(len(module.imports) for module in MODULES.values()) > 300
    assert sum(len(module.lazy_imports) for module in MODULES.values()) >= 4


# --- imports


def test_imports_run_down():
    none_of(floors, whole_config, packages_in_their_places)


def floors(module: Module) -> Iterator[str]:
    if module.folder and module.folder not in MAY_IMPORT:
        yield f"{module.file}: give the folder `{module.folder}` a floor: add it to MAY_IMPORT and to the design"
    allowed = MAY_IMPORT.get(module.folder, set()) | ({module.folder} - {""})
    for line, name in own(module.imports):
        if name != "finetune" and not is_within(name, allowed):
            yield (
                f"{module.file}:{line} imports {name}, but `{module.folder}` may import only "
                f"{', '.join(sorted(allowed))}. Pass the thing in as an argument, or move it to a lower floor"
            )


def whole_config(module: Module) -> Iterator[str]:
    for node in [] if module.folder in KNOW_THE_WHOLE_CONFIG else module.nodes:
        if "RunConfig" in {getattr(node, key, None) for key in ("id", "attr", "name")}:
            yield f"{module.at(node)}: take the section that you need, not the RunConfig"


def packages_in_their_places(module: Module) -> Iterator[str]:
    for line, name in module.imports:
        package = name.partition(".")[0]
        places = ONLY_IN.get(package)
        if places is not None and not is_within(module.name, places):
            yield f"{module.file}:{line}: only {', '.join(places)} import {package}; ask one of them for what you need"
        if package in THROUGH_OPTIONAL:
            yield f"{module.file}:{line}: {package} may be missing; get it with finetune.runtime.optional.require"


def test_nothing_is_imported_in_a_circle():
    """Neither modules nor, within a wing, folders."""
    modules = {name: {each for _, each in own(module.imports)} - {"finetune"} for name, module in MODULES.items()}
    assert_no_circle(modules)
    folders: dict[str, set[str]] = {}
    for name, imported in modules.items():
        others = {inner_folder(each) for each in imported}
        folders.setdefault(inner_folder(name), set()).update(each for each in others if each.count(".") > 1)
    inner = {folder: others - {folder} for folder, others in folders.items() if folder.count(".") > 1}
    assert {"finetune.data.order", "finetune.data.sources", "finetune.model.adapters"} <= inner.keys()
    assert_no_circle(inner)


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"{' -> '.join(reversed(error.args[1]))}: put what both need below both")


def inner_folder(name: str) -> str:
    """Return the folder of a module: `finetune.data.order` for `finetune.data.order.order`."""
    return name if (ROOT / name.replace(".", "/")).is_dir() else name.rpartition(".")[0]


def test_imports_stand_at_the_top_of_a_file():
    none_of(within_functions, by_name, lazy_ones_are_modules, type_checking)


def within_functions(module: Module) -> Iterator[str]:
    for function in module.functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield (
                    f"{module.at(node)}: import at the top of the file, "
                    "or with finetune.runtime.optional.require where the package may be missing"
                )


def by_name(module: Module) -> Iterator[str]:
    for node in [] if module.file in IMPORTS_BY_NAME else module.nodes:
        name = getattr(node, "attr", None) if isinstance(node, ast.Attribute) else getattr(node, "id", None)
        if name in ("import_module", "__import__"):
            yield f"{module.at(node)}: importing by name is the business of {', '.join(IMPORTS_BY_NAME)}"


def lazy_ones_are_modules(module: Module) -> Iterator[str]:
    for statement in module.lazy_imports:
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            yield f"{module.at(statement)}: write `from package import module`"
            continue
        start = f"{statement.module}." if isinstance(statement, ast.ImportFrom) else ""
        for name in (f"{start}{alias.name}" for alias in statement.names):
            if name.startswith("finetune.") and name not in MODULES:
                yield f"{module.at(statement)}: {name} is no module: it would have to be looked up at once"


def type_checking(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if "TYPE_CHECKING" in {getattr(node, key, None) for key in ("id", "attr", "name")}:
            yield f"{module.at(node)}: import what you need; if that makes a circle, put what both need below both"


def test_the_command_line_starts_without_torch():
    offenses = []
    for folder in WITHOUT_TORCH:
        for name in sorted(reachable({each.name for each in MODULES.values() if each.folder == folder})):
            for line, imported in MODULES[name].imports_at_once:
                if imported.partition(".")[0] in HEAVY:
                    offenses.append(f"{MODULES[name].file}:{line}: {folder} imports it, so import {imported} lazily")
    report(offenses)


def reachable(roots: set[str]) -> set[str]:
    """Return the modules that importing the roots imports, their packages' `__init__` included."""
    seen: set[str] = set()
    pending = set(roots)
    while pending:
        name = pending.pop()
        seen.add(name)
        imported = {each for _, each in own(MODULES[name].imports_at_once)}
        pending |= (imported | ({name.rpartition(".")[0]} if "." in name else set())) - seen
    return seen


# --- what is printed


def test_only_guarded_streams_are_printed_to():
    """Past them, secrets and terminal escapes would be printed."""
    none_of(ways_round, raw_json)


def ways_round(module: Module) -> Iterator[str]:
    names = {name.rpartition(".")[2]: name for _, name in module.imports if name in GUARDED_ELSEWHERE}
    for node in module.nodes:
        used = _unparsed(node.func if isinstance(node, ast.Call) else node) if is_use(node) else ""
        way = names.get(used, used)
        if way in GUARDED_ELSEWHERE and not is_within(module.name, GUARDED_ELSEWHERE[way]):
            yield (
                f"{module.at(node)} prints with {way}, past what takes secrets and escapes out: "
                "use print, or finetune.runtime.text.rich_console.ForeignTextConsole"
            )


def is_use(node: ast.AST) -> bool:
    """Tell whether the node may be one of these ways, by its last name alone."""
    called = node.func if isinstance(node, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else getattr(node, "attr", None)
    return any(way.endswith(f".{name}") for way in GUARDED_ELSEWHERE)


def raw_json(module: Module) -> Iterator[str]:
    for node in [] if is_within(module.name, EXACT_JSON) else module.nodes:
        if (
            isinstance(node, ast.Call)
            and _unparsed(node.func) in ("json.dumps", "json.dump")
            and any(each.arg == "ensure_ascii" for each in node.keywords)
        ):
            yield f"{module.at(node)}: use finetune.runtime.text.terminal.json_text"


# --- sizes and names


def test_files_functions_and_folders_are_small():
    none_of(long_files, long_functions)
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in (PACKAGE, *PACKAGE.rglob("*/"))}
    large = {folder.relative_to(ROOT): size for folder, size in sizes.items() if size > LARGEST_FOLDER}
    report([f"{folder} has {size} files: give each topic in it a folder" for folder, size in large.items()])


def long_files(module: Module) -> Iterator[str]:
    length = len(module.text.splitlines())
    if length > LONGEST_FILE:
        yield f"{module.file} has {length} lines: split it by what its parts are about"


def long_functions(module: Module) -> Iterator[str]:
    for function in module.functions:
        length = (function.end_lineno or 0) - function.lineno + 1
        if length > LONGEST_FUNCTION:
            yield f"{module.at(function)} {function.name} has {length} lines: name its parts as functions"


def test_names_are_the_terms_of_the_field():
    none_of(empty_file_names, home_made_words, home_made_sentences)


def empty_file_names(module: Module) -> Iterator[str]:
    for part in module.name.split("."):
        if part.lower() in BANNED_FILES:
            yield f"{module.file}: `{part}` says nothing; name what is in it"


def home_made_words(module: Module) -> Iterator[str]:
    for where, name in names_in(module):
        found = {word: REFUSED_WORDS[word] for word in words_of(name) if word in REFUSED_WORDS}
        for word, term in found.items():
            yield f"{where} {name}: `{word}` is a word of our own; the field says: {term}"

    for where, name in variables_in(module):
        for word in set(words_of(name)) & REFUSED_WORDS.keys():
            yield f"{where} {name}: `{word}` is a word of our own; the field says: {REFUSED_WORDS[word]}"


def home_made_sentences(module: Module) -> Iterator[str]:
    """Yield the words of the tables that docstrings, comments and messages hold."""
    terms = {word: term for word, term in REFUSED_WORDS.items() if word not in WORDS_OF_SENTENCES} | REFUSED_PHRASES
    pattern = re.compile(rf"(?<![\w.`-])({'|'.join(map(re.escape, terms))})(?![\w-])", re.IGNORECASE)
    for line, text in sentences_in(module):
        if RECORDED_KEYS.get(text) == module.file:
            continue
        for match in pattern.finditer(" ".join(text.split())):
            yield f"{module.file}:{line}: `{match[0]}`: write {terms[match[0].lower()]}"


def sentences_in(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, comment, message and other string."""
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_names_of_tests_stand_alone_in_a_log():
    offenses, num_tests = [], 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^ *(?:async )?def test_(\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            num_tests += 1
            where = f"{path.relative_to(ROOT)} test_{name}"
            words = name.split("_")
            if words[0] in RIDDLES:
                offenses.append(f"{where}: `{words[0]}` has no subject: name what is tested")
            for word in words:
                if term := (REFUSED_WORDS | NOT_IN_TEST_NAMES).get(word):
                    offenses.append(f"{where}: `{word}` is a word of our own; write: {term}")
    assert num_tests > 1000
    report(offenses)


def words_of(name: str) -> list[str]:
    """Return the words of a name in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def names_in(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the place and name of the module and of its classes, functions and parameters."""
    yield module.file, module.path.stem if module.path.stem != "__init__" else module.path.parent.name
    for node in module.nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield module.at(node), node.name
        elif isinstance(node, ast.arg):
            yield module.at(node), node.arg


def variables_in(module: Module) -> Iterator[tuple[str, str]]:
    """Yield the place and name of every field, attribute and local variable that is assigned."""
    for node in module.nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield module.at(node), node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield module.at(node), node.attr


def test_a_key_its_section_its_folder_and_its_tests_bear_one_name():
    sections = {path.stem for path in (PACKAGE / "config" / "sections").glob("*.py")} - {"__init__"}
    classes = [node for node in MODULES["finetune.config.run_config"].nodes if isinstance(node, ast.ClassDef)]
    (run_config,) = [node for node in classes if node.name == "RunConfig"]
    keys = {node.target.id for node in run_config.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    keys -= {"plugin_options", "version"}  # next to `plugins` in its file; a value
    assert keys == sections, "a top-level key and its file in config/sections bear the same name"
    for key in sorted(keys - {"evaluate", "plugins"}):  # they are in train/evaluate.py and in registry/plugins.py
        assert (PACKAGE / key).is_dir(), f"the section `{key}` has no folder finetune/{key}"
        assert (ROOT / "tests" / key).is_dir(), f"the section `{key}` has no folder tests/{key}"


def test_tests_mirror_the_folders_of_the_package():
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert {Path("run/setup"), Path("scenarios/resuming")} <= folders
    mirrors = [folder for folder in sorted(folders) if folder.parts and folder.parts[0] not in OTHER_TEST_FOLDERS]
    report(
        [
            f"tests/{folder}: there is no finetune/{folder}; a whole run is tested in tests/scenarios"
            for folder in mirrors
            if not (PACKAGE / folder).is_dir()
        ]
    )
