"""A name stands for one thing: no class and no public function of a module is defined in two of them."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "finetune"

DOORS = ("cli", "api", "commands")
"""A command bears its name in each: typed words, the Python API, and what both of them call."""

ROLES = {"main": "the start of a process: the command line, the launcher, a producer of rows, the verifier's program"}
"""Names of a protocol's role, which several modules have."""


def definitions():
    """Return the modules that define each class or public function, by name."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
            if isinstance(node, ast.ClassDef) or is_function:
                found[node.name].append(path.relative_to(PACKAGE).with_suffix("").as_posix())
    return found


FOUND = definitions()


def is_command(name, modules):
    """Return whether the modules are doors of one command, at most one of each kind."""
    doors = [module.partition("/")[0] for module in modules]
    return set(doors) <= set(DOORS) and len(set(doors)) == len(doors) and "cli" in doors


def test_the_package_was_read():
    assert len(FOUND) > 2000 and len(FOUND["main"]) == 3
    assert FOUND["check"] == ["api/commands", "cli/app", "commands/check"]


def test_no_class_and_no_public_function_shares_its_name_with_another():
    shared = [
        f"{name}: {', '.join(modules)}: name each after what it is"
        for name, modules in sorted(FOUND.items())
        if len(modules) > 1 and name not in ROLES and not is_command(name, modules)
    ]
    if shared:
        pytest.fail("\n".join(shared), pytrace=False)


def test_every_role_is_one_of_several_modules():
    assert [name for name in ROLES if len(FOUND[name]) < 2] == []
