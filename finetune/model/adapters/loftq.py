"""LoftQ (Li et al., 2023, arXiv:2310.08659): adapters begin as the best low-rank answer to what quantisation lost."""

from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors import safe_open
from torch import Tensor, nn

from finetune.errors import ModelError
from finetune.model.adapters.ground import Ground
from finetune.model.adapters.names import ADAPTER
from finetune.model.hub import told

_PREFIX = "base_model.model."


def make_up_for_quantization(model: PeftModel, ground: Ground) -> None:
    """Give each adapter the largest singular parts of `original - dequantised`, one round of the paper's algorithm.

    The originals are read from the base's safetensors one at a time; raises ModelError where one is not there.
    """
    with told(ground.base or "", key="model.lora.init"):
        places = _places(Path(ground.base or ""))
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                original = _original(name.removeprefix(_PREFIX) + ".weight", places)
                lost = original.float() - dequantized(module.get_base_layer())
                left, values, right = torch.linalg.svd(lost, full_matrices=False)
                rank = module.r[ADAPTER]
                root = (values[:rank] / module.scaling[ADAPTER]).sqrt()
                module.lora_A[ADAPTER].weight.copy_(root[:, None] * right[:rank])
                module.lora_B[ADAPTER].weight.copy_(left[:, :rank] * root)


def _places(folder: Path) -> dict[str, Path]:
    places: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            places.update(dict.fromkeys(file.keys(), path))
    return places


def _original(name: str, places: dict[str, Path]) -> Tensor:
    if name not in places:
        raise ModelError(
            f"model.lora.init: `loftq` compares with the weights as they were, and `{name}` is in no safetensors file "
            "of the base. Write `init: default`."
        )
    with safe_open(places[name], framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def dequantized(layer: nn.Module) -> Tensor:
    """Return the layer's weight with all its bits, [outputs, inputs], float32 on the CPU; a plain one as it is."""
    weight: Tensor = dequantize_module_weight(layer)
    return weight.detach().float().cpu()
