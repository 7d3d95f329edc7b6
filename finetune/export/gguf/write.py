"""Writes the tensors and metadata of a model folder to one GGUF file."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from finetune.errors import ModelError
from finetune.export.gguf.architectures import GGUFArchitecture, find_architecture, metadata, rope_divisors
from finetune.export.gguf.tokenizer import convert_tokenizer
from finetune.model.loading.pretrained import load_auto_class
from finetune.runtime.optional import require

GGUFType = Literal["f16", "q8_0"]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_LARGEST_HALF = 65504.0
_BLOCK = 32
"""The elements that share a scale in 8 bits."""


def write_gguf(
    folder: Path,
    path: Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Collection[int],
    dtype: GGUFType,
    trust_remote_code: bool = False,
) -> None:
    """Write the full model in the folder as `path`, which appears whole.

    Matrices have the dtype, vectors and routers of experts float32, like matrices that it cannot represent. Raises
    ModelError for a model or tokenizer whose equivalent in llama.cpp is not known.
    """
    gguf: Any = require("gguf", extra="gguf", purpose="writing GGUF files")
    config = load_auto_class(AutoConfig, folder, trust_remote_code=trust_remote_code)
    architecture = find_architecture(config)
    names = gguf.get_tensor_name_map(
        next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name),
        config.num_hidden_layers,
    )
    partial = path.with_name(f".{path.name}.part")
    writer = gguf.GGUFWriter(partial, architecture.name)
    writer.add_name(path.stem)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if dtype == "f16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    for key, value in metadata(architecture, config).items():
        name = f"{architecture.name}.{key}"
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(name, value)
    _add_tokenizer(writer, tokenizer, stop_ids=stop_ids, vocabulary_size=config.vocab_size)
    try:
        for name, tensor in _tensors(folder, architecture, config):
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None:
                raise ModelError(f"GGUF: llama.cpp's `{architecture.name}` has no tensor for `{name}` of {folder}.")
            types = gguf.GGMLQuantizationType
            if tensor.dim() == 1 or "ffn_gate_inp" in known or float(tensor.abs().max()) > _LARGEST_HALF:
                number_type = types.F32
            else:
                number_type = types.Q8_0 if dtype == "q8_0" and tensor.shape[-1] % _BLOCK == 0 else types.F16
            writer.add_tensor(
                known, gguf.quants.quantize(tensor.contiguous().numpy(), number_type), raw_dtype=number_type
            )
        if (divisors := rope_divisors(config)) is not None:
            writer.add_tensor("rope_freqs.weight", torch.tensor(divisors).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _add_tokenizer(
    writer: Any, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Collection[int], vocabulary_size: int
) -> None:
    converted = convert_tokenizer(tokenizer, stop_ids=stop_ids, vocabulary_size=vocabulary_size)
    writer.add_tokenizer_model(converted.model)
    writer.add_tokenizer_pre(converted.pre)
    writer.add_token_list(converted.tokens)
    writer.add_token_types(converted.types)
    if converted.scores:
        writer.add_token_scores(converted.scores)
    if converted.merges:
        writer.add_token_merges(converted.merges)
    for key, number in converted.ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", number)
    for key, flag in converted.flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", flag)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _tensors(folder: Path, architecture: GGUFArchitecture, config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors as llama.cpp computes with them: experts stacked, norms with their offset."""
    experts: dict[str, dict[int, Tensor]] = {}
    num_experts: int = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name).float()
                if match := _EXPERT.fullmatch(name):
                    stack = experts.setdefault(f"{match[1]}.{match[3]}", {})
                    stack[int(match[2])] = tensor
                    if len(stack) < num_experts:
                        continue
                    name, tensor = f"{match[1]}.{match[3]}", torch.stack([stack[n] for n in range(num_experts)])
                    stack.clear()
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                yield _named_as_merged(name), _as_computed(name, tensor, architecture, config)


def _named_as_merged(name: str) -> str:
    """Return the name under which llama.cpp's table has stacked experts of Mixtral."""
    return re.sub(r"^model\.layers\.(\d+)\.block_sparse_moe\.experts\.", r"layers.\1.feed_forward.experts.", name)


def _as_computed(name: str, tensor: Tensor, architecture: GGUFArchitecture, config: Any) -> Tensor:
    if architecture.norm_offset and name.endswith("norm.weight"):
        return tensor + architecture.norm_offset
    projection = name.split(".")[-2]
    if architecture.permutes and projection in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor
