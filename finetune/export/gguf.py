"""Write a model and its tokenizer as one GGUF file, which llama.cpp and the programs built on it load.

Each model type was compared with transformers through llama-cpp-python (`tests/export/test_gguf.py`). The keys are
as in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from finetune.errors import ModelError
from finetune.model.loading.pretrained import load_auto_class
from finetune.runtime.optional import require

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS: Mapping[tuple[str, bool], str] = {
    ("", False): "gpt-2",
    ("digits", False): "smollm",
    (_LLAMA3, True): "llama-bpe",
    (_LLAMA3, False): "dbrx",
    (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), False): "qwen2",
}
"""llama.cpp's name of each pre-tokenizer: its regular expression, and whether whole words skip the merges."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
_LOWEST_SCORE = -1e6


def convert_tokenizer(
    tokenizer: PreTrainedTokenizerBase, *, stop_ids: Collection[int], vocabulary_size: int
) -> dict[str, Any]:
    """Return the file's `tokenizer.ggml` values for that number of embeddings.

    Of a SentencePiece model there are scores instead of merges. Raises ModelError for a tokenizer that llama.cpp lacks.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    model = content.get("model", {})
    if model.get("type") != "BPE":
        raise _unknown(f"a tokenizer of the type {model.get('type', type(tokenizer).__name__)}")
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id = {number: text for text, number in model["vocab"].items()} | {n: added[n]["content"] for n in added}
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(vocabulary_size)]
    is_spm = bool(model.get("byte_fallback"))

    def type_of(number: int) -> int:
        if number not in by_id:
            return UNUSED
        if is_spm and by_id[number] == model.get("unk_token"):
            return UNKNOWN
        if number in added:
            return CONTROL if added[number]["special"] else USER_DEFINED
        is_byte = is_spm and len(by_id[number]) == 6 and by_id[number].startswith("<0x")
        return BYTE if is_byte else NORMAL

    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    begins = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    values: dict[str, Any] = {
        "model": "llama" if is_spm else "gpt2",
        "pre": "default" if is_spm else _pre_tokenizer(content),
        "tokens": tokens,
        "token_type": list(map(type_of, range(vocabulary_size))),
        **_special_ids(tokenizer, stop_ids),
        "add_bos_token": begins,
        "add_eos_token": False,
    }
    if not is_spm:
        return {**values, "merges": merges}
    normalizer, steps = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    parts = [*normalizer.get("normalizers", [normalizer]), *steps.get("pretokenizers", [steps])]
    adds_prefix = any(
        part.get("type") == "Prepend" or part.get("prepend_scheme") in ("first", "always") for part in parts
    )
    return {**values, "scores": _scores(tokens, merges), "add_space_prefix": adds_prefix}


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    steps = content.get("pre_tokenizer") or {}
    parts = steps.get("pretokenizers", [steps])
    patterns = [part["pattern"].get("Regex", "") for part in parts if part.get("type") == "Split"]
    patterns += ["digits" for part in parts if part.get("type") == "Digits" and part["individual_digits"]]
    byte_level = [part for part in parts if part.get("type") == "ByteLevel"]
    is_whole = len(byte_level) == 1 and len(patterns) + 1 == len(parts) and not byte_level[0]["add_prefix_space"]
    pattern = "".join(patterns)
    has_own_regex = pattern in ("", "digits")
    name = _PRE_TOKENIZERS.get((pattern, bool(content["model"].get("ignore_merges"))))
    if name is None or not is_whole or byte_level[0]["use_regex"] != has_own_regex:
        raise _unknown(f"this pre-tokenizer: {json.dumps(steps)[:300]}")
    return name


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return a score for each piece, the higher the earlier it is merged.

    llama.cpp merges any two neighbors whose text is a piece; raises ModelError if the tokenizer merges only some.
    """
    pairs = {tuple(merge.split(" ")): rank for rank, merge in reversed(list(enumerate(merges)))}
    pieces = set(tokens)
    rank_of: dict[str, int] = {}
    for (left, right), rank in pairs.items():
        rank_of[left + right] = min(rank, rank_of.get(left + right, rank))
    for piece in rank_of:
        splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        missing = next((split for split in splits if pieces.issuperset(split) and split not in pairs), None)
        if missing is not None:
            raise _unknown(f"a tokenizer with pieces but without all of their merges ({' + '.join(missing)})")
    return [-float(rank_of[token]) if token in rank_of else _LOWEST_SCORE for token in tokens]


def _special_ids(tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int]) -> dict[str, int]:
    """Return the ids of special tokens by key; llama.cpp ends answers at `eos`, `eot` and `eom`."""
    stops = sorted(stop_ids, key=lambda token: (token != tokenizer.eos_token_id, token))
    if len(stops) > 3:
        raise _unknown(f"{len(stops)} tokens that end an answer ({stops}); it has keys for three")
    ids = dict(zip(("eos", "eot", "eom"), stops, strict=False))
    others = {"bos": tokenizer.bos_token_id, "unknown": tokenizer.unk_token_id, "padding": tokenizer.pad_token_id}
    ids |= {name: number for name, number in others.items() if number is not None}
    return {f"{name}_token_id": number for name, number in ids.items()}


def _unknown(what: str) -> ModelError:
    return ModelError(
        f"GGUF: llama.cpp has no equivalent of {what}. Its own converter (convert_hf_to_gguf.py) refuses it, too, or "
        "guesses: compare the tokens with `finetune verify serving` if you use it."
    )


@dataclass(frozen=True)
class GGUFArchitecture:
    """A model type: `name` is llama.cpp's, `keys` are from its metadata to the attributes of the config."""

    name: str
    permutes: bool = False  # its rotary embedding pairs neighbors, so rows of queries and keys are reordered
    norm_offset: float = 0.0  # added to the weights of norms
    sliding_every: int = 0  # of this number of layers, the last one attends to everything; 0: all
    keys: Mapping[str, str] | None = None


_GEMMA = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_WIDTH = {"expert_feed_forward_length": "moe_intermediate_size"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", permutes=True),
    "mistral": GGUFArchitecture("llama", permutes=True),
    "mixtral": GGUFArchitecture("llama", permutes=True, keys={**_EXPERTS, "expert_count": "num_local_experts"}),
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3_moe": GGUFArchitecture("qwen3moe", keys={**_EXPERTS, **_WIDTH}),
    "olmo2": GGUFArchitecture("olmo2"),
    "gemma": GGUFArchitecture("gemma", norm_offset=1.0),
    "gemma2": GGUFArchitecture("gemma2", norm_offset=1.0, sliding_every=2, keys=_GEMMA),
    "gemma3_text": GGUFArchitecture("gemma3", norm_offset=1.0, sliding_every=6, keys=_GEMMA),
    "phi3": GGUFArchitecture("phi3"),
    "granite": GGUFArchitecture("granite", permutes=True, keys=_GRANITE),
}


def find_architecture(config: Any) -> GGUFArchitecture:
    """Return the architecture of the model; raises ModelError if it is unknown, or differs from GGUF's."""
    architecture = ARCHITECTURES.get(config.model_type)
    problem = f"`{config.model_type}` is not a model type that it writes" if architecture is None else None
    if architecture is not None:
        problem = next(_differences(architecture, config), None)
    if problem is not None or architecture is None:
        raise ModelError(
            f"GGUF: {problem}. Use llama.cpp's own converter, in an environment of its own:\n"
            "  git clone https://github.com/ggml-org/llama.cpp && pip install -r llama.cpp/requirements.txt\n"
            f"  python llama.cpp/convert_hf_to_gguf.py {config.name_or_path} --outtype bf16"
        )
    return architecture


def metadata(architecture: GGUFArchitecture, config: Any) -> dict[str, int | float | str]:
    """Return the values of the file's keys, without the name of the architecture in front."""
    head_dim = _head_dim(config)
    values: dict[str, int | float | str | None] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": int(head_dim * _rope(config).get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(_rope(config)["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    values |= {key: getattr(config, name) for key, name in (architecture.keys or {}).items()}
    if "sliding_attention" in (config.rope_parameters or {}):
        values["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if _rope(config)["rope_type"] in ("linear", "yarn"):
        values["rope.scaling.type"] = _rope(config)["rope_type"]
        values["rope.scaling.factor"] = float(_rope(config)["factor"])
    if _rope(config)["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = _rope(config)["original_max_position_embeddings"]
    return {key: value for key, value in values.items() if value is not None}


def rope_divisors(config: Any) -> list[float] | None:
    """Return the divisors of the rotary frequencies of Llama 3.1; None for other models."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    dimension = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    divisors = []
    for index in range(0, dimension, 2):
        wavelength = 2 * math.pi * float(rope["rope_theta"]) ** (index / dimension)
        smooth = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (smooth + (1 - smooth) / rope["factor"]))
    return divisors


def _differences(architecture: GGUFArchitecture, config: Any) -> Iterator[str]:
    """Yield what llama.cpp computes otherwise; it takes these values from the architecture, not from the file."""
    rope, layers = _rope(config), config.num_hidden_layers
    if rope["rope_type"] not in ("default", "linear", "yarn", "llama3"):
        yield f"positions are scaled by `{rope['rope_type']}`"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if scalar not in (None, _head_dim(config)) and layers not in (46, 62):  # of the 27B models
        yield f"`query_pre_attn_scalar` is {scalar} instead of the head dimension, {_head_dim(config)}"
    period = architecture.sliding_every
    expected = ["full_attention" if not period or (n + 1) % period == 0 else "sliding_attention" for n in range(layers)]
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    if list(types) != expected and (window or 0) < config.max_position_embeddings:
        yield f"its sliding window of {window} is on other layers than in llama.cpp's `{architecture.name}`"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is bidirectional"


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _rope(config: Any) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    return {"rope_type": "default", **parameters.get("full_attention", parameters)}


GGUFType = Literal["f16", "q8_0"]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_MIXTRAL_EXPERTS = re.compile(r"^model\.layers\.(\d+)\.block_sparse_moe\.experts\.")
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
    converted = convert_tokenizer(tokenizer, stop_ids=stop_ids, vocabulary_size=config.vocab_size)
    add_by_type = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for group, values in ((architecture.name, metadata(architecture, config)), ("tokenizer.ggml", converted)):
        for key, value in values.items():
            add_by_type[type(value)](f"{group}.{key}", value)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
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
                projection = name.split(".")[-2]
                if architecture.norm_offset and name.endswith("norm.weight"):
                    tensor = tensor + architecture.norm_offset
                elif architecture.permutes and projection in ("q_proj", "k_proj"):
                    heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
                    halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
                    tensor = halves.transpose(1, 2).reshape(tensor.shape)
                # llama.cpp's table has stacked experts of Mixtral under the name of a merged file
                yield _MIXTRAL_EXPERTS.sub(r"layers.\1.feed_forward.experts.", name), tensor
