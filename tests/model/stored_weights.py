"""Writes small models with weights stored quantized, as the tools for such checkpoints do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 320}
_LLAMA = {**_SIZES, "intermediate_size": 128, "num_key_value_heads": 4}
_GPT_OSS = {**_SIZES, "intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP microscaling formats 1.0: E2M1 without its sign
_BLOCK = 16


def write_config(folder: Path, stored: dict[str, Any] | None) -> None:
    """Write the config of a llama with these values of `quantization_config`."""
    config = AutoConfig.for_model("llama", **_LLAMA).to_dict()
    (folder / "config.json").write_text(json.dumps({**config, **({"quantization_config": stored} if stored else {})}))


def write_fp8(folder: Path) -> dict[str, Tensor]:
    """Write 8-bit floats with a scale per block, as DeepSeek does; return the weights before."""

    def store(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = (size // _BLOCK for size in weight.shape)
        blocks = weight.reshape(rows, _BLOCK, columns, _BLOCK)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        return {name: codes, f"{name}_scale_inv": scales}

    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
    return _write(folder, _built("llama", _LLAMA), stored, store, names=("_proj.weight",))


def write_mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write the experts as 4-bit floats, two in a byte, with a power of two per 32 of them, as gpt-oss does."""

    def store(name: str, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.mT.reshape(weight.shape[0], weight.shape[2], -1, 32)  # [experts, outputs, blocks, 32]
        exponents = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True) / 6.0)) + 1
        values = blocks / 2**exponents
        magnitudes = (values.abs()[..., None] - torch.tensor(_FP4)).abs().argmin(-1)
        codes = (magnitudes + 8 * (values < 0)).to(torch.uint8)
        packed = codes[..., ::2] | (codes[..., 1::2] << 4)
        return {f"{name}_blocks": packed, f"{name}_scales": (exponents[..., 0] + 127).to(torch.uint8)}

    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return _write(
        folder, _built("gpt_oss", _GPT_OSS), stored, store, names=("experts.gate_up_proj", "experts.down_proj")
    )


def write_compressed(folder: Path) -> dict[str, Tensor]:
    """Write 8-bit integers with a scale per row, as llm-compressor does."""

    def store(name: str, weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 127
        return {name: (weight / scales).round().to(torch.int8), f"{name}_scale": scales}

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    stored = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    stored |= {"config_groups": groups, "ignore": ["lm_head"]}
    return _write(folder, _built("llama", _LLAMA), stored, store, names=("_proj.weight",))


WRITERS: dict[str, Callable[[Path], dict[str, Tensor]]] = {
    "fp8": write_fp8,
    "mxfp4": write_mxfp4,
    "compressed-tensors": write_compressed,
}
"""By the method's name in `quantization_config`."""


def _built(model_type: str, values: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))


def _write(
    folder: Path,
    model: PreTrainedModel,
    stored: dict[str, Any],
    store: Callable[[str, Tensor], dict[str, Tensor]],
    *,
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    model.save_pretrained(folder / "plain")
    config = json.loads((folder / "plain/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    originals = {name: weight for name, weight in model.state_dict().items() if name.endswith(names)}
    tensors = {name: weight for name, weight in model.state_dict().items() if name not in originals}
    for name, weight in originals.items():
        tensors |= store(name, weight)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return originals
