"""Measures the shape of the package: how long functions are, and how often they are called.

    python benchmarks/code_metrics.py                    # this checkout
    python benchmarks/code_metrics.py --tree ../before   # another one beside it

Everything is read with `ast`; nothing is run. "Lines of code" leaves out blank lines, comments and docstrings. A use is
counted by its name, whatever object it is looked up on, so functions with common names do not count as called once.
How many files a start goes through is drawn by `benchmarks/call_drawing.py`.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def measure(root: Path) -> dict[str, str]:
    modules = read_package(root)
    functions = [function for module in modules.values() for function in module.functions]
    module_level = [node for module in modules.values() for node in module.tree.body if isinstance(node, Function)]
    uses = count_uses(modules)
    once = [function for function in module_level if uses[function.name] == 1]
    short = [function for function in once if function.name.startswith("_") and body_lines(function) <= 2]
    num_code = sum(map(count_code_lines, modules.values()))
    one_importer = [name for name, found in importers(modules).items() if len(found) == 1]
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
