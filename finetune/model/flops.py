"""The arithmetic that a trained token takes, from which a run's model FLOPs utilisation (MFU) follows.

Chowdhery et al. (2022, arXiv:2204.02311), appendix B: 6 N + 12 L H Q T per token, of which a third is the forward pass.
What gradient checkpointing computes again is not counted: the utilisation is the model's, not the hardware's.
"""

from typing import Any

from torch import nn

from finetune.model.memory.step import read_shapes
from finetune.runtime.parameters import num_values

_EXPERTS = ".experts."
"""In the name of a parameter of which a token passes only its own experts' part."""


def flops_per_token(model: nn.Module, *, attended: float) -> float | None:
    """Return the FLOPs of one trained token of `model`, whose tokens attend over `attended` tokens on average.

    2 per weight in the forward pass, 2 for the gradient of its input, and 2 for its own gradient where it is trained:
    6 N for full training, nearly 4 N with adapters on a frozen base. The embedding is looked up, not multiplied, unless
    it is the head as well. The scores of attention take 4 L H Q T, and twice that in the backward pass; as in the paper
    a causal mask saves nothing. Where lower layers are frozen, their share of the backward pass is counted although
    none is computed. None for a model whose tokens do not all pass the same weights: an encoder with a decoder, images.
    """
    config: Any = getattr(model, "config", None)
    shapes = read_shapes(config) if config is not None else None
    if shapes is None or getattr(config, "is_encoder_decoder", False) or hasattr(config, "vision_config"):
        return None
    multiplied = trained = 0.0
    looked_up = _looked_up(model)
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up:
            continue
        size = num_values(parameter) * (_expert_share(config) if _EXPERTS in name else 1.0)
        multiplied += size
        trained += size if parameter.requires_grad else 0.0
    return 4 * multiplied + 2 * trained + 12 * shapes.layers * shapes.queries * attended


def _looked_up(model: nn.Module) -> set[int]:
    """Return the parameters of embeddings, without one that is the head's matrix, too."""
    heads = {id(each.weight) for each in model.modules() if isinstance(each, nn.Linear)}
    tables = {id(each) for module in model.modules() if isinstance(module, nn.Embedding) for each in module.parameters()}
    return tables - heads


def _expert_share(config: Any) -> float:
    """Return the share of the routed experts that compute one token."""
    text = config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((found for name in names if isinstance(found := getattr(text, name, None), int) and found), 1)
    return (getattr(text, "num_experts_per_tok", None) or total) / total
