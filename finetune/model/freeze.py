"""Parameters that do not learn, chosen by patterns on their names."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from finetune.errors import ModelError

KEY, ONLY = "model.freeze", "model.train_only"


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Let the matching parameters alone learn, all of them where there are no patterns; a tied one has both names.

    Raises ModelError for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    chosen = {name for pattern in patterns for name in _matched(pattern, list(parameters), key=ONLY)}
    learning = {parameters[name] for name in chosen}
    for parameter in parameters.values() if patterns else ():
        parameter.requires_grad_(parameter in learning)


def freeze(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Stop the matching parameters from learning and return their names; both names of a tied parameter can be used.

    Raises ModelError for a pattern that matches nothing, and when nothing would be left to learn.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen: list[str] = []
    for pattern in patterns:
        frozen.extend(_matched(pattern, list(parameters), key=KEY))
    for name in frozen:
        parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"{KEY}: {', '.join(patterns)} freeze every parameter, so nothing would learn. Leave some out."
        )
    return tuple(dict.fromkeys(frozen))


def _matched(pattern: str, names: list[str], *, key: str) -> list[str]:
    matched = [name for name in names if fnmatchcase(name, pattern)]
    if not matched:
        raise ModelError(f"{key}: no parameter is called `{pattern}`. {_near(pattern, names)}")
    return matched


def _near(pattern: str, names: list[str]) -> str:
    near = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"Parameters are called, for example, {', '.join(f'`{name}`' for name in near)}."
