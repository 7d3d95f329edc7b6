"""Parameters that are not trained, by name patterns or because their module's output is unused.

Unused modules get no gradients, for which DDP would wait forever.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from finetune.errors import ModelError

KEY, ONLY = "model.freeze", "model.train_only"


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train only the matching parameters, or all without patterns; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    matching = {name for pattern in patterns for name in matched_parameters(pattern, list(parameters), key=ONLY)}
    trained = {parameters[name] for name in matching}
    for parameter in parameters.values() if patterns else ():
        parameter.requires_grad_(parameter in trained)


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Freeze the matching parameters and return their names; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing, and when no parameter would be trained.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen: list[str] = []
    for pattern in patterns:
        frozen.extend(matched_parameters(pattern, list(parameters), key=KEY))
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{KEY}: every parameter is frozen, so nothing would be trained. Remove some patterns.")
    return tuple(dict.fromkeys(frozen))


def matched_parameters(pattern: str, names: list[str], *, key: str) -> list[str]:
    """Return the names that match; raises ModelError if there are none."""
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        similar = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
        examples = ", ".join(f"`{name}`" for name in similar)
        raise ModelError(f"{key}: no parameter matches `{pattern}`. Examples of parameter names: {examples}.")
    return matched


FEATURE_LAYER_KEY = "vision_feature_layer"
"""Config key of LLaVA and similar models for the image encoder's layer whose output is used; later ones are unused."""

_VISION_TOWER = "vision_tower"
_MODULES_AFTER_LAYERS = ("post_layernorm", "layernorm", "head")


POOLER = "pooler"
"""BERT's layer over the first token, which only some heads read."""


def unused_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of modules whose output is unused; usually none.

    These are the layers of an image encoder after the last used one, and the pooler of a model without a head, which
    only the hidden states are used.
    """
    has_head = getattr(model, "base_model", None) is not model
    if not has_head and isinstance(getattr(model, POOLER, None), nn.Module):
        return (POOLER,)
    read = getattr(getattr(model, "config", None), FEATURE_LAYER_KEY, None)
    if read is None:
        return ()
    unused: list[str] = []
    for name, tower in model.named_modules():
        stacks = {path: module for path, module in tower.named_modules() if isinstance(module, nn.ModuleList)}
        if name.rpartition(".")[2] != _VISION_TOWER or not stacks:
            continue
        longest = max(stacks, key=lambda path: len(stacks[path]))
        num_layers = len(stacks[longest])
        indices = [read] if isinstance(read, int) else list(read)
        num_read = max(index if index >= 0 else num_layers + 1 + index for index in indices)
        unused += [f"{name}.{longest}.{number}" for number in range(num_read, num_layers)]
        paths = [path for path, _ in tower.named_modules() if path.rpartition(".")[2] in _MODULES_AFTER_LAYERS]
        unused += [f"{name}.{path}" for path in paths]
    return tuple(unused)


def peft_exclude_pattern(model: nn.Module) -> str | None:
    """Return peft's pattern for unused modules, which get no adapter; None without unused modules."""
    names = unused_modules(model)
    return "|".join(rf"{re.escape(name)}(\..*)?" for name in names) or None
