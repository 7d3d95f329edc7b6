"""Measures the shape of the package: how long functions are, how often they are called, how far one value travels.

    python benchmarks/code_metrics.py                    # this checkout
    python benchmarks/code_metrics.py --tree ../before   # another one beside it

Everything is read with `ast`; nothing is run. "Lines of code" leaves out blank lines, comments and docstrings. A use is
counted by its name, whatever object it is looked up on, so functions with common names do not count as called once.
The walk starts at a parameter and follows every call that passes it, a part of it, or what a call made of it, to the
function of this package that the name resolves to; a function is entered once for each of its parameters.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
FLOORS = {
    "__main__": 10,
    **dict.fromkeys(("cli", "api"), 9),
    "commands": 8,
    "run": 7,
    "memory": 6,
    "train": 5,
    **dict.fromkeys(("task", "export"), 4),
    **dict.fromkeys(("data", "model", "strategy", "checkpoint", "report"), 3),
    **dict.fromkeys(("config", "registry", "runtime", "launch", "recipes"), 2),
    "errors": 1,
}
MAX_STEPS = 20_000


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def floor(self) -> int:
        return FLOORS.get([*self.name.split("."), ""][1], 9)

    @cached_property
    def imported(self) -> Mapping[str, str]:
        """Full names of what the file imports, by the names that it uses."""
        names = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                names.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
            elif isinstance(node, ast.Import):
                names.update({alias.asname or alias.name: alias.name for alias in node.names})
        return names

    @property
    def functions(self) -> Iterator[Function]:
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def read_package(root: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted((root / "finetune").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    return modules


def count_code_lines(module: Module) -> int:
    """Count the lines that hold a token other than a comment or a docstring."""
    docstrings = set()
    for node in ast.walk(module.tree):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.update(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def body_lines(function: Function) -> int:
    """Count the lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return ((body[-1].end_lineno or 0) - body[0].lineno + 1) if body else 0


def count_uses(modules: Mapping[str, Module]) -> Counter[str]:
    """Count how often each name is read, as a name or an attribute, outside of imports."""
    uses: Counter[str] = Counter()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return uses


def importers(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return, by module, which other modules import it or a name of it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for name in module.imported.values():
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module.name:
                found[target].add(module.name)
    return found


@dataclass
class Walk:
    """How far a parameter travels: the files that it enters, and how it comes back."""

    modules: Mapping[str, Module]
    files: set[str] = field(default_factory=set)
    num_calls: int = 0
    num_steps_up: int = 0
    num_returns: int = 0
    _entered: set[tuple[str, str, str]] = field(default_factory=set)
    _current: Module | None = None

    def follow(self, module: Module, function: Function, parameter: str) -> None:
        key = (module.name, function.name, parameter)
        if key in self._entered or self.num_calls >= MAX_STEPS:
            return
        self._entered.add(key)
        self.files.add(module.name)
        carriers = {parameter}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _carries(node.value, carriers):
                carriers.update(name.id for target in node.targets for name in _names(target))
            elif isinstance(node, ast.withitem) and node.optional_vars and _carries(node.context_expr, carriers):
                carriers.update(name.id for name in _names(node.optional_vars))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for callee_module, callee, passed_to in self._passed(module, call, carriers):
                self.num_calls += 1
                self._go_to(module)
                self._go_to(callee_module)
                self.follow(callee_module, callee, passed_to)

    def _go_to(self, module: Module) -> None:
        """Continue in this file: back in a caller's, or on into a callee's."""
        if module is not self._current:
            self.num_steps_up += self._current is not None and module.floor > self._current.floor
            self.num_returns += module.name in self.files
            self._current = module

    def _passed(self, module: Module, call: ast.Call, carriers: set[str]) -> Iterator[tuple[Module, Function, str]]:
        resolved = self._resolve(module, call.func)
        if resolved is None:
            return
        owner, function = resolved
        parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        parameters = parameters[1:] if parameters[:1] in (["self"], ["cls"]) else parameters
        for position, value in enumerate(call.args):
            if _carries(value, carriers) and position < len(parameters):
                yield owner, function, parameters[position]
        for keyword in call.keywords:
            if keyword.arg is not None and _carries(keyword.value, carriers):
                yield owner, function, keyword.arg

    def _resolve(self, module: Module, called: ast.expr) -> tuple[Module, Function] | None:
        if isinstance(called, ast.Name):
            full = module.imported.get(called.id, f"{module.name}.{called.id}")
        elif isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
            full = f"{module.imported.get(called.value.id, '')}.{called.attr}"
        else:
            return None
        owner = self.modules.get(full.rpartition(".")[0])
        for node in owner.tree.body if owner else []:
            if isinstance(node, Function) and node.name == full.rpartition(".")[2]:
                return owner, node  # type: ignore[return-value]
        return None


def _carries(value: ast.expr, carriers: set[str]) -> bool:
    """Tell whether the value is one of the carriers, a part of one, or what a call makes of one."""
    if isinstance(value, ast.Call):
        return any(_carries(each, carriers) for each in (*value.args, *(each.value for each in value.keywords)))
    return _root(value) in carriers


def _names(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)]


def _root(value: ast.expr) -> str | None:
    """Return the name at the root of `name`, `name.part` and `name.part.of_it`."""
    while isinstance(value, ast.Attribute):
        value = value.value
    return value.id if isinstance(value, ast.Name) else None


def measure(root: Path) -> dict[str, str]:
    modules = read_package(root)
    functions = [function for module in modules.values() for function in module.functions]
    module_level = [node for module in modules.values() for node in module.tree.body if isinstance(node, Function)]
    uses = count_uses(modules)
    once = [function for function in module_level if uses[function.name] == 1]
    short = [function for function in once if function.name.startswith("_") and body_lines(function) <= 2]
    num_code = sum(map(count_code_lines, modules.values()))
    one_importer = [name for name, found in importers(modules).items() if len(found) == 1]
    walk = Walk(modules)
    start = next(node for node in modules["finetune.cli.app"].functions if node.name == "train")
    walk.follow(modules["finetune.cli.app"], start, "config")
    tests = list((root / "tests").rglob("*.py"))
    context = [
        function
        for module in modules.values()
        if module.name.startswith("finetune.run")
        for function in module.functions
        if any("RunContext" in ast.unparse(arg.annotation) for arg in _arguments(function) if arg.annotation)
    ]
    return {
        "files of finetune/": f"{len(modules):,}",
        "lines of finetune/": f"{sum(len(module.text.splitlines()) for module in modules.values()):,}",
        "lines of code": f"{num_code:,}",
        "lines of tests/": f"{sum(len(path.read_text().splitlines()) for path in tests):,}",
        "functions": f"{len(functions):,}",
        "functions per 1,000 lines of code": f"{1000 * len(functions) / num_code:.0f}",
        "median lines of a function's body": f"{statistics.median(map(body_lines, functions)):.0f}",
        "module-level functions called once": f"{100 * len(once) / len(module_level):.0f}% ({len(once):,})",
        "of them private, of one or two lines": f"{len(short):,}",
        "modules with one importer": f"{len(one_importer):,}",
        "functions of run/ that take a RunContext": f"{len(context):,}",
        "the job of `train`: files entered": f"{len(walk.files):,}",
        "the job of `train`: steps back up to a higher floor": f"{walk.num_steps_up:,}",
        "the job of `train`: returns to a file left before": f"{walk.num_returns:,}",
        "the job of `train`: calls": f"{walk.num_calls:,}" + (" (not over)" if walk.num_calls >= MAX_STEPS else ""),
    }


def _arguments(function: Function) -> Sequence[ast.arg]:
    return (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="Another checkout; can be repeated.")
    trees = [Path(__file__).resolve().parents[1], *parser.parse_args().tree]
    columns = [measure(tree) for tree in trees]
    width = max(map(len, columns[0]))
    print(" " * width, *(f"{tree.name[-16:]:>16}" for tree in trees))
    for name in columns[0]:
        print(f"{name:<{width}}", *(f"{column[name]:>16}" for column in columns))


if __name__ == "__main__":
    main()
