"""Workaround for transformers' scaled rotary embeddings; a test fails when it is no longer needed."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig


def written_head_size(config: PreTrainedConfig, parameters: Mapping[str, Any]) -> dict[str, int]:
    """Return `head_dim` where the config leaves it open and the scaling needs it; nothing elsewhere.

    transformers 5.23 computes `yarn`, `dynamic` and `longrope` with `getattr(config, "head_dim", ...)`, which is None
    in Mixtral and MiniMax (`modeling_rope_utils.py`): TypeError. `linear` and `llama3` take `hidden_size /
    num_attention_heads` then, as the models do. It is written into the config, so that the export loads as well.
    """
    layers: list[Mapping[str, Any]] = [each for each in parameters.values() if isinstance(each, dict)]
    needs = any(each.get("rope_type") in ("yarn", "dynamic", "longrope") for each in layers or [parameters])
    if not needs or getattr(config, "is_heterogeneous", False) or getattr(config, "head_dim", 0) is not None:
        return {}
    values: Any = config
    return {"head_dim": values.hidden_size // values.num_attention_heads}
