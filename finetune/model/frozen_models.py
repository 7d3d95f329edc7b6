"""Frozen models in training: the base of adapters, which may be quantized, the reference model and the teacher.

Each has a digest, by which a resume and a cache of its outputs detect other weights. A quantized base is that of QLoRA
(Dettmers et al., 2023, arXiv:2305.14314); weights may also be stored quantized.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    TorchAoConfig,
)

from finetune.config.sections.model import ADAPTER_KEYS, ModelSection
from finetune.config.sections.task import DistillationSection
from finetune.errors import ModelError, Problem
from finetune.model.adapters.context import adapter_config, has_adapter
from finetune.model.attention.implementation import default_attention
from finetune.model.loading.hub import CONFIG, is_local_path, loading_errors, resolve_name
from finetune.model.loading.pretrained import (
    ADAPTER_CONFIG,
    check_no_missing_weights,
    load_named,
    load_weights,
    placed_on,
)
from finetune.model.upstream import adapters_disabled
from finetune.runtime.files.digests import sha256_digest
from finetune.runtime.optional import require
from finetune.runtime.upstream import is_offline, without_hub_retries

WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Patterns of weight files, the preferred format first; if both exist, the other one is not read."""

_NUM_THREADS = 8


def base_digest(
    section: ModelSection, *, model: Any, is_reference: bool = False, log: Callable[[str], None]
) -> str | None:
    """Return the identity of the frozen weights, None if nothing is frozen or weights are initialized from the seed.

    The weights of a loss's reference model count as frozen. Like `weights_digest`, call it on one rank.
    """
    is_frozen = adapter_config(section) is not None or section.freeze or section.train_only or is_reference
    if section.name is None or not is_frozen:
        return None
    return weights_digest(section.name, section=section, revision=section.revision, model=model, log=log)


def weights_digest(
    name: str,
    *,
    section: ModelSection,
    key: str = "model.name",
    revision: str | None = None,
    model: Any = None,
    log: Callable[[str], None],
) -> str:
    """Return the identity of the weights of `name`, which `key` of the job names, such as `model.name`.

    For a folder, a SHA-256 over its weights and config.json, independent of its path; for a hub model, the commit that
    was loaded, found offline. May read every byte of a folder's weights: call it on one rank.
    """
    if is_local_path(name):
        return folder_digest(Path(resolve_name(name, key=key)))
    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    if commit is None:  # the folder of a cached config.json is named after its commit
        path = try_to_load_from_cache(name, CONFIG, cache_dir=section.cache_folder, revision=revision)
        commit = Path(path).parent.name if isinstance(path, str) else None
    if commit is None:
        log(f"{key}: the commit of `{name}` is unknown, so a resume would not notice a change")
    return f"commit {commit or 'unknown'}"


def folder_digest(folder: Path) -> str:
    """Return a digest over the digests of the files of weights and configs by name; raises ModelError.

    They are listed as `sha256sum` would. Reads every file that is new since the last time: call it on one rank.
    """
    files = [path for path in (folder / CONFIG, folder / ADAPTER_CONFIG) if path.exists()]
    for pattern in WEIGHT_FILES:
        if weights := list(folder.glob(pattern)):
            files += [*weights, *folder.glob(f"{pattern}.index.json")]
            break
    files.sort()
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:  # hashing releases the GIL
            digests = list(threads.map(sha256_digest, files))
    except OSError as error:
        raise ModelError(f"model.name: {error.filename or folder} cannot be read: {error.strerror}.") from error
    listed = "".join(f"{digest}  {path.name}\n" for path, digest in zip(files, digests, strict=True))
    return f"sha256 {hashlib.sha256(listed.encode()).hexdigest()}"


_INITS_FROM_BASE = ("pissa", "olora", "loftq")
"""Initializations that move a part of the base into the adapters: the base alone is not the original model."""

# fmt: off
_KEYS_WITHOUT_EFFECT = frozenset({
    "gradient_checkpointing", "activation_offload", "cache_folder", "freeze", "train_only", "name", "revision",
    "tokenizer",
})
# fmt: on


def reference_is_base(section: ModelSection) -> bool:
    """Return whether the reference is the model without its adapters.

    It is not if training continues a saved adapter, or if a part of the base moves into the adapters.
    """
    if section.adapter is not None:
        return False
    return section.lora is None or not section.lora.init.startswith(_INITS_FROM_BASE)


@contextmanager
def reference_mode(model: Any, section: ModelSection) -> Iterator[None]:
    """In this context, make the model compute the reference's outputs, with adapters off if they start as the identity.

    Unlike peft's own switch, this does not change `requires_grad`. `model` is not wrapped by a strategy.
    """
    if not has_adapter(model) or not reference_is_base(section):
        yield
        return
    if model.peft_config[model.active_adapter].is_prompt_learning:
        with model.disable_adapter():  # for these, it only skips the prompt
            yield
        return
    with adapters_disabled(model):
        yield


def reference_identity(
    section: ModelSection, *, seed: int, model: Any, log: Callable[[str], None]
) -> Mapping[str, Any]:
    """Return the inputs of the reference's outputs as JSON values; may read all weights, so call it on one rank.

    New adapters, which the reference does not use, are not included, so that jobs with other LoRA ranks share a cache.
    """
    excluded = _KEYS_WITHOUT_EFFECT | (frozenset(ADAPTER_KEYS) if reference_is_base(section) else frozenset())
    identity: dict[str, Any] = section.model_dump(mode="json", exclude=set(excluded), exclude_defaults=True)
    if section.name is not None:
        revision = section.revision
        identity["weights"] = weights_digest(section.name, section=section, revision=revision, model=model, log=log)
    if section.name is None or "lora" in identity or section.new_tokens is not None:
        identity["seed"] = seed
    if section.adapter is not None:
        identity["adapter"] = folder_digest(Path(resolve_name(str(section.adapter), key="model.adapter")))
    return identity


TEACHER_KEY = "task.distillation.teacher"


def load_teacher(
    section: DistillationSection, *, model: ModelSection, vocabulary_size: int, device: torch.device
) -> PreTrainedModel:
    """Return the teacher on the device, frozen, in evaluation mode and in `teacher_dtype`; raises ModelError."""
    config = load_named(AutoConfig, section.teacher, key=TEACHER_KEY, section=model)
    with (
        loading_errors(section.teacher, key=TEACHER_KEY),
        without_hub_retries(is_local=is_local_path(section.teacher)),
    ):
        teacher: PreTrainedModel
        teacher, loading = load_weights(
            AutoModelForCausalLM,
            resolve_name(section.teacher, key=TEACHER_KEY),
            config=config,
            dtype=getattr(torch, section.teacher_dtype),
            attn_implementation=default_attention(config),
            cache_dir=model.cache_folder,
            trust_remote_code=model.trust_remote_code,
            local_files_only=is_local_path(section.teacher) or is_offline(),
            output_loading_info=True,
            **placed_on(device),
        )
        check_no_missing_weights(loading, section.teacher, key=TEACHER_KEY)
    size = teacher.config.get_text_config().vocab_size
    if size < vocabulary_size:
        raise ModelError(
            f"{TEACHER_KEY}: `{section.teacher}` has a vocabulary of {size}, but the student's tokenizer has "
            f"{vocabulary_size} tokens. They must share a tokenizer: use another teacher, or its tokenizer for the "
            "student."
        )
    return teacher.requires_grad_(False).eval().to(device)


def check_teacher_tokenizer(section: DistillationSection, *, model: ModelSection, tokenizer: Any) -> None:
    """Raise ModelError unless the tokenizers of teacher and student have the same vocabulary."""
    teacher = load_named(AutoTokenizer, section.teacher, key=TEACHER_KEY, section=model).get_vocab()
    student = tokenizer.get_vocab()
    differing = sorted(token for token in student.keys() | teacher.keys() if student.get(token) != teacher.get(token))
    if differing:
        raise ModelError(
            f"{TEACHER_KEY}: the tokenizer of `{section.teacher}` differs from the student's in {len(differing)} "
            f"tokens, such as {differing[0]!r}. Use a teacher of the same family, or write "
            f"`model.tokenizer: {{name: {section.teacher}}}` for a student that is trained from random weights."
        )


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
