"""Workarounds for peft's LoRA on mixtures of experts and on mixers (peft 0.21, transformers 5.23).

Each says when it can be removed; a test fails when it is no longer needed.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager

from peft.utils import transformers_weight_conversion as conversion
from torch import nn

from finetune.model.upstream import patched


@contextmanager
def keep_targets() -> Iterator[None]:
    """Prevent peft from changing the given targets.

    peft 0.21 rewrites the targets of some mixtures of experts as if they named modules of transformers 4: `gate_proj`
    becomes the parameter `gate_up_proj` of the routed experts at twice the rank, `all-linear` also adapts the router,
    and shared experts and dense layers with the same names lose their adapters (`_convert_peft_config_moe`). Can be
    removed when that is limited to adapters written by transformers 4.
    """
    with patched([(conversion, "convert_peft_config_for_transformers", lambda config, model, conversions: None)]):
        yield


def rewritten_names(model_type: str) -> frozenset[str]:
    """Return the names of modules that peft, on loading, replaces with parameters of the routed experts."""
    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    if pattern is None or conversion.get_checkpoint_conversion_mapping(model_type) is None:
        return frozenset()
    if not conversion._MOE_FUSED_TARGETS.get(pattern):
        return frozenset()
    return frozenset(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {}))


_REFUSED_BY_PEFT = ("mamba", "mixer")


def is_read_by_kernel(parent: nn.Module, name: str) -> bool:
    """Return whether a mixer passes the weight of its layer to a kernel instead of calling the layer.

    An adapter of that layer would not be trained. peft 0.21 refuses `out_proj` of mamba, mamba2, falcon_mamba,
    falcon_h1 and nemotron_h for this reason, but misses bamba, granitemoehybrid, jamba and zamba2, and `x_proj` and
    `dt_proj` of mamba (`_check_lora_target_modules_mamba`).
    """
    mixer_class = type(parent)
    if not any(part in mixer_class.__name__.lower() for part in _REFUSED_BY_PEFT):
        return False
    try:
        source = inspect.getsource(mixer_class)
    except (OSError, TypeError):  # code that was not read from a file
        return False
    return re.search(rf"self\.{re.escape(name)}\.weight\b(?!\.dtype)", source) is not None
