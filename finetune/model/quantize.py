"""A quantized, frozen base (QLoRA: Dettmers et al., 2023, arXiv:2305.14314)."""

from importlib.util import find_spec
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import BitsAndBytesConfig, TorchAoConfig

from finetune.config.sections.model import ModelSection, QuantizationSection
from finetune.model.loading.hub import is_local_path, loading_errors, resolve_name
from finetune.runtime.hub import is_offline
from finetune.runtime.optional import require

_EXTRAS = {"bitsandbytes": "quantization", "torchao": "torchao"}


def quantization_config(section: ModelSection) -> Any:
    """Return the config for transformers, None without quantization; raises MissingPackage.

    4-bit weights of bitsandbytes are stored as `model.dtype`: FSDP shards only floating-point tensors
    (https://huggingface.co/docs/bitsandbytes/main/fsdp_qlora).
    """
    quantization = section.quantization
    if quantization is None:
        return None
    require(
        quantization.method,
        extra=_EXTRAS[quantization.method],
        purpose=f"model.quantization.method: {quantization.method}",
    )
    if quantization.method == "torchao":  # 8-bit weights: config/rules refuses others
        torchao = require("torchao.quantization", extra="torchao", purpose="model.quantization.method: torchao")
        return TorchAoConfig(torchao.Int8WeightOnlyConfig())
    return _bitsandbytes(quantization, dtype=section.dtype)


def is_installed(package: str) -> bool:
    """Return whether the package is installed, without importing it."""
    return find_spec(package) is not None


def unquantized_weights_folder(section: ModelSection) -> str | None:
    """Return the folder of the unquantized weights; None if they are not needed."""
    if section.name is None or section.lora is None or section.lora.init != "loftq":
        return None
    if is_local_path(section.name):
        return resolve_name(section.name, key="model.name")
    with loading_errors(section.name, key="model.name"):
        return snapshot_download(
            section.name,
            revision=section.revision,
            cache_dir=section.cache_folder,
            allow_patterns=["*.safetensors"],
            local_files_only=is_offline(),
        )


def _bitsandbytes(section: QuantizationSection, *, dtype: str) -> BitsAndBytesConfig:
    if section.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=section.kind,
        bnb_4bit_use_double_quant=section.double,
        bnb_4bit_compute_dtype=getattr(torch, section.compute_dtype),
        bnb_4bit_quant_storage=getattr(torch, dtype),
    )
