"""Which values of a config a model reads: those that its class names, and those that the model's source looks up.

Many models read more than the signature of their config has: `getattr(config, "head_dim", ...)`. The source is parsed,
not run.
"""

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

ROPE_VALUES = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor"})
"""Values that transformers folds into `rope_parameters`."""
DECODER_START_TOKEN = "decoder_start_token_id"
"""The first token of a decoder; not every config of an encoder-decoder declares it."""

_CONFIG = "config"


def known_names(config_class: type[Any]) -> frozenset[str]:
    """Return the names of all values that can be set in the config and that its class or its model reads."""
    names: set[str] = set(getattr(config_class, "attribute_map", {}))
    names.update(_signature(config_class), _signature(PreTrainedConfig))
    names |= ROPE_VALUES if "rope_parameters" in names else frozenset()
    names |= {DECODER_START_TOKEN} if getattr(config_class, "is_encoder_decoder", False) is True else frozenset()
    return frozenset((names | names_in_source(config_class)) - {"self"})


def suggestion(name: str, names: list[str]) -> str:
    """Return a sentence with the name that is most like it; empty where none is."""
    near = get_close_matches(name, names, n=1)
    return f" Did you mean `{near[0]}`?" if near else ""


def sub_configs(config_class: Any) -> Mapping[str, Any]:
    """Return the sub-configs by name, such as `text_config` and `vision_config`."""
    return getattr(config_class, "sub_configs", None) or {}


def sub_config_class(config_class: Any, name: str, written: Mapping[str, Any]) -> Any:
    """Return the class of a sub-config; None where only transformers knows it."""
    if sub_configs(config_class)[name] is not AutoConfig:
        return sub_configs(config_class)[name]
    defaults = getattr(config_class, "sub_configs_defaults", {})
    kind = written.get("model_type") or getattr(defaults.get(name), "model_type", None)
    return CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else None  # noqa: SIM401  # its `get` loads nothing


def names_in_source(config_class: Any) -> frozenset[str]:
    """Return the values that the source of the class's model reads from this config, and not from another one.

    A model of several configs (text, vision) says in annotations which one it reads; what it does not say is left out.
    """
    files = _modeling_files(config_class.__module__)
    configs = {name for file in files for name in _imported_configs(file)}
    parts = {name: getattr(each, "__name__", "") for name, each in sub_configs(config_class).items()}
    is_only = len(configs | {config_class.__name__}) == 1
    found: set[str] = set()
    for file in files:
        reads = _Reads(_parsed(file), parts)
        found |= reads.of(config_class.__name__) | (reads.of("") if is_only else set())
    elsewhere = {name for each in sub_configs(config_class).values() for name in _signature(each)}
    return frozenset(name for name in found - elsewhere - _computed(config_class) if _is_value(config_class, name))


def _signature(owner: Any) -> Iterator[str]:
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(owner.__init__).parameters
    return (name for name, parameter in parameters.items() if parameter.kind != parameter.VAR_KEYWORD)


def _is_value(config_class: type[Any], name: str) -> bool:
    """Tell whether the name is one that can be set: no method, no property, and nothing private."""
    inherited = getattr(config_class, name, None)
    return not name.startswith("_") and not callable(inherited) and not isinstance(inherited, property)


def _computed(config_class: type[Any]) -> set[str]:
    """Return the values that the config computes itself, whatever is written."""
    file = getattr(sys.modules.get(config_class.__module__), "__file__", None)
    classes = [] if file is None else [node for node in _parsed(Path(file)).body if isinstance(node, ast.ClassDef)]
    own = (node for each in classes if each.name == config_class.__name__ for node in ast.walk(each))
    targets = (target for node in own if isinstance(node, ast.Assign) for target in node.targets)
    return {each.attr for each in targets if isinstance(each, ast.Attribute) and _is_self(each.value)}


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _modeling_files(module: str) -> list[Path]:
    """Return the files beside the config's own that hold its models."""
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None and (spec := find_spec(module)) is not None:
        origin = spec.origin
    if origin is None or "configuration_" not in Path(origin).name:
        return []
    own = Path(origin).with_name(Path(origin).name.replace("configuration_", "modeling_"))
    return [own] if own.is_file() else sorted(Path(origin).parent.glob("modeling_*.py"))


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imported_configs(file: Path) -> Iterator[str]:
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").rpartition(".")[2].startswith("configuration_"):
            yield from (alias.name for alias in node.names if alias.name.endswith("Config"))


class _Reads:
    """What a module reads from its configs, by the name of the config's class; empty: nobody says of which."""

    def __init__(self, module: ast.Module, parts: Mapping[str, str]) -> None:
        self._parts = parts  # from the name of a sub-config to its class
        self._classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
        self._found: dict[str, set[str]] = {}
        for node in module.body:
            self._visit(node, own=self._config_of(node) if isinstance(node, ast.ClassDef) else "", given="")

    def of(self, config: str) -> set[str]:
        """Return the names that are read from that config."""
        return self._found.get(config, set())

    def _visit(self, node: ast.AST, *, own: str, given: str) -> None:
        """Collect what is read below the node; `own` is the class of `self.config`, `given` of a parameter `config`."""
        if isinstance(node, ast.FunctionDef):
            given = _annotation_of(node) or own or given
        read = _read_name(node)
        if read is not None:
            owner, name = read
            self._found.setdefault(self._owner(owner, own=own, given=given), set()).add(name)
        for child in ast.iter_child_nodes(node):
            self._visit(child, own=own, given=given)

    def _owner(self, node: ast.expr, *, own: str, given: str) -> str:
        """Return the class of the config that the expression is; unknown configs are called by what they are."""
        if isinstance(node, ast.Name):
            return given if node.id == _CONFIG else self._parts.get(node.id, f"variable {node.id}")
        assert isinstance(node, ast.Attribute)
        if _is_self(node.value) and node.attr == _CONFIG:
            return own or given
        return self._parts.get(node.attr, f"part {node.attr}")

    def _config_of(self, node: ast.ClassDef, *, depth: int = 0) -> str:
        """Return the class of the config that a class of the module keeps as `self.config`."""
        for each in node.body:
            named = _annotation_of(each) if isinstance(each, ast.FunctionDef) and each.name == "__init__" else ""
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id == _CONFIG:
                named = each.annotation.id if isinstance(each.annotation, ast.Name) else ""
            if named:
                return named
        bases = (self._classes.get(base.id) for base in node.bases if isinstance(base, ast.Name))
        known = (self._config_of(base, depth=depth + 1) for base in bases if base is not None and depth < 8)
        return next((each for each in known if each), "")


def _annotation_of(function: ast.FunctionDef) -> str:
    """Return the class of the function's parameter `config`; empty where there is none, or it has no plain class."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    annotations = (each.annotation for each in arguments if each.arg == _CONFIG)
    return next((each.id for each in annotations if isinstance(each, ast.Name) and each.id != "PreTrainedConfig"), "")


def _read_name(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Return a config and the name that the node reads from it: `config.X`, `getattr(config, "X", ...)`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        name = node.args[1] if len(node.args) > 1 else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_config(node.args[0]):
            return node.args[0], name.value
    return None


def _is_config(node: ast.expr) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == _CONFIG or name.endswith("_config")
