"""FSDP1's settings run under FSDP2, translated as `accelerate to-fsdp2` does (`commands/to_fsdp2.py` of 1.15).

Accelerate's default is `fsdp_version: 1`, so `accelerate config` writes such files.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from finetune.errors import StrategyError
from finetune.strategy.environment import is_true

_RESHARDS: Mapping[str, bool] = {
    "FULL_SHARD": True,
    "SHARD_GRAD_OP": False,
    "NO_SHARD": False,
    "HYBRID_SHARD": True,
    "HYBRID_SHARD_ZERO2": False,
}
"""FSDP1's sharding strategies, and whether FSDP2 frees what it gathered after a forward pass."""

_NUMBERS = {str(number): name for number, name in enumerate(_RESHARDS, start=1)}
_COPIES = "; copies are `parallelism_config_dp_replicate_size` (hsdp.yaml)"
_NOT_THE_SAME: Mapping[str, str] = {
    "NO_SHARD": ", which shards (ddp.yaml does not)",
    "HYBRID_SHARD": _COPIES,
    "HYBRID_SHARD_ZERO2": _COPIES,
}
_STRATEGY, _RESHARD = "fsdp_sharding_strategy", "fsdp_reshard_after_forward"
_WITHOUT_EFFECT = ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params")
"""FSDP2 always prefetches in the backward pass, sends weights where one rank loads them, and keeps parameters."""

_UNSUPPORTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "fsdp_auto_wrap_policy": (("SIZE_BASED_WRAP",), "TRANSFORMER_BASED_WRAP"),  # it would wrap the list of layers
    "fsdp_state_dict_type": (("LOCAL_STATE_DICT", "2"), "SHARDED_STATE_DICT"),
}
"""Values that FSDP2 does not support, and what to write instead."""


@dataclass(frozen=True)
class Translation:
    """The translation of FSDP1's settings; all others mean the same under FSDP2."""

    reshards: bool  # fsdp_reshard_after_forward
    removed: tuple[str, ...]  # keys
    sentence: str
    problems: tuple[tuple[str, str], ...]  # key and message of each setting that FSDP2 does not support


def to_fsdp2(settings: Mapping[str, Any]) -> Translation:
    """Return the translation of FSDP1's settings, by the keys of `fsdp_config`.

    >>> print(to_fsdp2({"fsdp_sharding_strategy": 2, "fsdp_use_orig_params": True}).sentence)
    fsdp_version: 1 runs under FSDP2, with the same losses. fsdp_sharding_strategy: SHARD_GRAD_OP is \
fsdp_reshard_after_forward: false. Without effect: fsdp_use_orig_params. `accelerate to-fsdp2` rewrites the file.
    """
    reshards, changes, problems = True, [], []
    for key in (_STRATEGY, _RESHARD):  # the launcher sets both, one of them by default
        written = str(settings.get(key, True)).upper()
        name = _NUMBERS.get(written, written)
        if name in _RESHARDS:
            becomes = f"{_RESHARD}: {str(_RESHARDS[name]).lower()}{_NOT_THE_SAME.get(name, '')}"
            changes.append(f"{key}: {name} is {becomes}.")
        elif name not in ("TRUE", "FALSE"):
            problems.append((key, f"FSDP2 does not support `{settings[key]}`. Write `{_RESHARD}: true`, or `false`."))
        reshards = reshards and _RESHARDS.get(name, name == "TRUE")
    for key, (values, instead) in _UNSUPPORTED.items():
        if str(settings.get(key)).upper() in values:
            problems.append((key, f"FSDP2 does not support `{settings[key]}`. Write `{instead}`."))
    if unused := [key for key in _WITHOUT_EFFECT if key in settings]:
        changes.append(f"Without effect: {', '.join(unused)}.")
    first, last = "fsdp_version: 1 runs under FSDP2, with the same losses.", "`accelerate to-fsdp2` rewrites the file."
    removed = tuple(key for key in (_STRATEGY, *_WITHOUT_EFFECT) if key in settings)
    return Translation(reshards, removed, " ".join((first, *changes, last)), tuple(problems))


def use_fsdp2(variables: MutableMapping[str, str]) -> list[str]:
    """Replace the launcher's variables for FSDP1 by those for FSDP2, and return a sentence that names them.

    If they are not set, nothing changes. Raises StrategyError with every setting that FSDP2 does not support.
    """
    if not is_true(variables, "ACCELERATE_USE_FSDP") or variables.get("FSDP_VERSION") == "2":
        return []
    translation = to_fsdp2({name.lower(): value for name, value in variables.items() if name.startswith("FSDP_")})
    if translation.problems:
        listed = "\n".join(f"  {key}: {message}" for key, message in translation.problems)
        raise StrategyError(f"fsdp_version: 1 runs under FSDP2, which does not support every setting\n{listed}")
    for key in translation.removed:
        del variables[key.upper()]
    variables.update({"FSDP_VERSION": "2", _RESHARD.upper(): str(translation.reshards).lower()})
    return [translation.sentence]


def fsdp1_in_file(values: Mapping[str, Any]) -> Translation | None:
    """Return the translation of an accelerate file's settings for FSDP1; None if it has none."""
    section = values.get("fsdp_config")
    written = section.items() if isinstance(section, Mapping) else ()
    settings = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in written}
    is_fsdp1 = str(settings.get("fsdp_version", 1)) != "2"
    is_fsdp = str(values.get("distributed_type", "")).upper() == "FSDP"
    return to_fsdp2(settings) if is_fsdp and is_fsdp1 else None
