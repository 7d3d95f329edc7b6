"""A quantized, frozen base (QLoRA: Dettmers et al., 2023, arXiv:2305.14314), and weights that are stored quantized."""

from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import BitsAndBytesConfig, TorchAoConfig

from finetune.config.sections.model import ModelSection
from finetune.errors import Problem
from finetune.model.loading.hub import is_local_path, loading_errors, resolve_name
from finetune.runtime.optional import require
from finetune.runtime.upstream import is_offline

_EXTRAS = {"bitsandbytes": "quantization", "torchao": "torchao"}

_DEQUANTIZED = ("fp8", "mxfp4", "compressed-tensors")
"""Methods of stored weights that transformers turns into plain ones of `model.dtype` while it loads them (5.24)."""


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
    if quantization.bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization.kind,
        bnb_4bit_use_double_quant=quantization.double,
        bnb_4bit_compute_dtype=getattr(torch, quantization.compute_dtype),
        bnb_4bit_quant_storage=getattr(torch, section.dtype),
    )


def stored_method(config: Any) -> str | None:
    """Return the method by which a model's weights are stored quantized, from its config; None if they are plain."""
    stored = _stored(config)
    if stored.get("load_in_4bit") or stored.get("load_in_8bit"):
        return "bitsandbytes"
    return str(stored.get("quant_method", "an unknown method")) if stored else None


def dequantize_while_loading(config: Any) -> None:
    """Make transformers dequantize stored weights while it loads them, so that they can be trained.

    Without a GPU that is the default; on a GPU transformers would keep them for its kernels, through which no gradient
    passes. Raises MissingPackage.
    """
    method = stored_method(config)
    if method not in _DEQUANTIZED:
        return
    if method == "compressed-tensors":
        require("compressed_tensors", extra="quantization", purpose="weights stored by compressed-tensors")
    config.quantization_config = {**_stored(config), "dequantize": True}


def stored_problems(config: Any, section: ModelSection, *, strategy: str = "") -> Iterator[Problem]:
    """Yield why stored quantized weights cannot be trained as requested; nothing for plain ones."""
    method, written = stored_method(config), section.quantization
    if method is None:
        return
    stores = f"the weights of `{section.name}` are stored quantized by {method}"
    if method == "bitsandbytes":
        values_of = _stored(config)
        stored: dict[str, Any] = {"method": "bitsandbytes", "bits": 8 if values_of.get("load_in_8bit") else 4}
        if stored["bits"] == 4:
            stored["kind"] = values_of.get("bnb_4bit_quant_type", "fp4")
            stored["double"] = bool(values_of.get("bnb_4bit_use_double_quant", False))
            stored["compute_dtype"] = str(values_of.get("bnb_4bit_compute_dtype", "float32"))
        if written is None or {**written.model_dump(), **stored} != written.model_dump():
            values = ", ".join(f"{name}: {str(value).lower()}" for name, value in stored.items())
            message = f"{stores}. Write `model.quantization: {{{values}}}`, and an adapter such as `model.lora`."
            yield Problem("model.quantization" if written else "model.name", message)
        elif "fsdp" in strategy and values_of.get("bnb_4bit_quant_storage", "uint8") != section.dtype:
            message = f"{stores} as integers, and FSDP shards only floating-point tensors. Launch with ddp.yaml."
            yield Problem("model.name", message)
    elif method not in _DEQUANTIZED:
        message = f"{stores}, which cannot be trained; {', '.join(_DEQUANTIZED)} and bitsandbytes can. Name the model "
        yield Problem("model.name", message + "that it was made from; `model.quantization` quantizes it while loading.")
    elif written is not None:
        message = f"{stores} already, and loaded as plain ones. Remove it, or name the model that they were made from."
        yield Problem("model.quantization", message)
    elif strategy == "zero3":
        message = f"{stores}, and ZeRO-3 shards parameters before that. Launch with fsdp2.yaml or zero2.yaml."
        yield Problem("model.name", message)


def _stored(config: Any) -> dict[str, Any]:
    stored = getattr(config, "quantization_config", None)
    return dict(stored if isinstance(stored, dict) else stored.to_dict()) if stored else {}


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
