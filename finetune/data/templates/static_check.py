"""Static analysis of Jinja templates: which ones need little time and memory for any input."""

import re
from collections.abc import Iterator
from functools import lru_cache

from jinja2 import Environment, TemplateError, nodes

_MAX_CHARACTERS = 1 << 18
_MAX_LOOP_DEPTH = 4
_MAX_NUMBER = 10_000
_MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")

# fmt: off
_FILTERS = frozenset({
    "trim", "tojson", "fromjson", "length", "count", "string", "int", "float", "join", "items",
    "upper", "lower", "title", "capitalize", "first", "last", "default", "d", "list", "reverse",
    "sort", "selectattr", "rejectattr", "select", "reject", "map", "unique", "dictsort", "safe", "e",
    "escape", "abs", "round", "min", "max", "sum", "striptags", "groupby",
})
_METHODS = frozenset({
    "strip", "lstrip", "rstrip", "split", "rsplit", "splitlines", "partition", "rpartition",
    "startswith", "endswith", "removeprefix", "removesuffix", "items", "keys", "values", "get",
    "lower", "upper", "title", "capitalize", "find", "rfind", "index", "count", "isdigit", "isspace",
    "isalpha", "changed", "previtem", "nextitem", "cycle", "append", "pop",
})
# fmt: on
_FUNCTIONS = frozenset(("raise_exception", "namespace", "dict", "strftime_now"))
_GROWING = (nodes.Mul, nodes.Pow, nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@lru_cache(maxsize=64)
def is_bounded(template: str, *, may_gather: bool = True) -> bool:
    """Return whether the template cannot amplify its input: it has no products, formats, ranges, or recursion.

    Returns False if that cannot be decided. With `may_gather`, a namespace may accumulate text over the turns of a
    conversation, as most chat templates do; repeated doubling is not detected then.
    """
    if len(template) > _MAX_CHARACTERS:
        return False
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_markers(template))
        has_unbounded_node = any(True for _ in _unbounded_nodes(tree, may_gather=may_gather))
        return not has_unbounded_node and _loop_depth(tree) <= _MAX_LOOP_DEPTH
    except (TemplateError, RecursionError, MemoryError):  # reported when it is compiled in the sandbox
        return False


def without_markers(template: str) -> str:
    """Return the template without `{% generation %}` and its end, which only transformers' Jinja extension supports."""
    return _MARKERS.sub("", template)


def _unbounded_nodes(tree: nodes.Template, *, may_gather: bool) -> Iterator[nodes.Node]:
    """Yield the nodes whose result may be much larger than the template's input."""
    macros = {macro.name for macro in tree.find_all(nodes.Macro)}
    yield from tree.find_all(_GROWING)
    yield from (node for node in tree.find_all(nodes.Mod) if not _is_loop_modulo(node))
    yield from (node for node in tree.find_all(nodes.Filter) if node.name not in _FILTERS)
    yield from (node for node in tree.find_all(nodes.For) if node.recursive)
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, int) and abs(constant.value) > _MAX_NUMBER:
            yield constant
    yield from (node for node in tree.find_all(nodes.Call) if not _is_bounded_call(node, macros))
    for macro in tree.find_all(nodes.Macro):
        yield from (name for name in macro.find_all(nodes.Name) if name.name in macros and name.ctx == "load")
    if not may_gather:
        yield from tree.find_all(nodes.NSRef)


def _loop_depth(node: nodes.Node) -> int:
    """Return the maximum depth of nested loops."""
    inner = max((_loop_depth(child) for child in node.iter_child_nodes()), default=0)
    return inner + isinstance(node, nodes.For)


def _is_loop_modulo(node: nodes.Mod) -> bool:
    """Return whether this is an expression such as `loop.index0 % 2`, and not a format."""
    is_loop_attribute = isinstance(node.left, nodes.Getattr) and getattr(node.left.node, "name", None) == "loop"
    return is_loop_attribute and isinstance(node.right, nodes.Const)


def _is_bounded_call(call: nodes.Call, macros: set[str]) -> bool:
    function, arguments = call.node, call.args
    if isinstance(function, nodes.Name):
        if function.name == "strftime_now":  # a format may contain a width
            return all(isinstance(value, nodes.Const) and not re.search(r"\d", str(value.value)) for value in arguments)
        return function.name in _FUNCTIONS or function.name in macros
    if not isinstance(function, nodes.Getattr):
        return False
    if function.attr != "replace":
        return function.attr in _METHODS
    lengths = [len(str(value.value)) for value in arguments[:2] if isinstance(value, nodes.Const)]
    return len(lengths) == 2 and lengths[0] > 0 and lengths[1] <= lengths[0] + 1
