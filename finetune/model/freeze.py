"""Parameters that do not learn, chosen by patterns on their names."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from finetune.errors import ModelError

KEY = "model.freeze"


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Stop the matching parameters from learning and return their names; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing, and when nothing would be left to learn.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen: list[str] = []
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            raise ModelError(f"{KEY}: no parameter is called `{pattern}`. {_near(pattern, list(parameters))}")
        frozen.extend(matched)
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{KEY}: {', '.join(patterns)} freeze every parameter, so nothing would learn. Leave some out."
        )
    return tuple(dict.fromkeys(frozen))


def _near(pattern: str, names: list[str]) -> str:
    near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"Parameters are called, for example, {', '.join(f'`{name}`' for name in near)}."
