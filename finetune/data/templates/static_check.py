"""Which templates need little time and memory whatever their input: decided from their Jinja, before they run."""

import re
from collections.abc import Iterator
from functools import lru_cache

from jinja2 import Environment, TemplateError, nodes

_LONGEST = 1 << 18  # characters
_DEEPEST_LOOPS = 4
_LARGEST_NUMBER = 10_000
_MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")

_FILTERS = frozenset(
    (
        *("trim", "tojson", "fromjson", "length", "count", "string", "int", "float", "join", "items"),
        *("upper", "lower", "title", "capitalize", "first", "last", "default", "d", "list", "reverse"),
        *("sort", "selectattr", "rejectattr", "select", "reject", "map", "unique", "dictsort", "safe", "e"),
        *("escape", "abs", "round", "min", "max", "sum", "striptags", "groupby"),
    )
)
_METHODS = frozenset(
    (
        *("strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition"),
        *("startswith", "endswith", "removeprefix", "removesuffix", "items", "keys", "values", "get"),
        *("lower", "upper", "title", "capitalize", "find", "rfind", "index", "count", "isdigit", "isspace"),
        *("isalpha", "changed", "previtem", "nextitem", "cycle", "append", "pop"),
    )
)
_FUNCTIONS = frozenset(("raise_exception", "namespace", "dict", "strftime_now"))
_GROWING = (nodes.Mul, nodes.Pow, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@lru_cache(maxsize=64)
def is_bounded(template: str, *, may_gather: bool = True) -> bool:
    """Return whether nothing in the template makes much of little: no products, formats, ranges, recursion.

    Undecidable templates are not. With `may_gather`, a namespace may gather text over the turns of a conversation,
    as most chat templates do; one that doubles it is not seen.
    """
    if len(template) > _LONGEST:
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_markers(template))
        return not any(True for _ in _unbounded_nodes(tree, may_gather=may_gather)) and _loops(tree) <= _DEEPEST_LOOPS
    except (TemplateError, RecursionError, MemoryError):  # reported where it is compiled, in a process of its own
        return False


def without_markers(template: str) -> str:
    """Return the template without `{% generation %}` and its end, which only transformers' own Jinja knows."""
    return _MARKERS.sub("", template)


def _unbounded_nodes(tree: nodes.Template, *, may_gather: bool) -> Iterator[nodes.Node]:
    """Yield what may grow beyond what the template is given."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    yield from tree.find_all(_GROWING)
    yield from (each for each in tree.find_all(nodes.Mod) if not _counts_turns(each))
    yield from (each for each in tree.find_all(nodes.Filter) if each.name not in _FILTERS)
    yield from (each for each in tree.find_all(nodes.For) if each.recursive)
    yield from (each for each in tree.find_all(nodes.Const) if _is_large(each.value))
    yield from (each for each in tree.find_all(nodes.Call) if not _is_bounded_call(each, macros))
    for macro in tree.find_all(nodes.Macro):
        yield from (name for name in macro.find_all(nodes.Name) if name.name in macros and name.ctx == "load")
    if not may_gather:
        yield from tree.find_all(nodes.NSRef)


def _loops(node: nodes.Node) -> int:
    """Return how many loops stand in one another at most."""
    inner = max((_loops(child) for child in node.iter_child_nodes()), default=0)
    return inner + isinstance(node, nodes.For)


def _counts_turns(each: nodes.Mod) -> bool:
    is_place = isinstance(each.left, nodes.Getattr) and getattr(each.left.node, "name", None) == "loop"
    return is_place and isinstance(each.right, nodes.Const)


def _is_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > _LARGEST_NUMBER


def _is_bounded_call(call: nodes.Call, macros: set[str]) -> bool:
    called, arguments = call.node, call.args
    if isinstance(called, nodes.Name):
        if called.name == "strftime_now":  # a width in a format is a number
            return all(isinstance(each, nodes.Const) and not re.search(r"\d", str(each.value)) for each in arguments)
        return called.name in _FUNCTIONS or called.name in macros
    if not isinstance(called, nodes.Getattr):
        return False
    if called.attr == "replace":
        return len(arguments) >= 2 and _does_not_grow(arguments[0], arguments[1])
    return called.attr in _METHODS


def _does_not_grow(old: nodes.Expr, new: nodes.Expr) -> bool:
    lengths = [len(str(each.value)) for each in (old, new) if isinstance(each, nodes.Const)]
    return len(lengths) == 2 and lengths[0] > 0 and lengths[1] <= lengths[0] + 1
