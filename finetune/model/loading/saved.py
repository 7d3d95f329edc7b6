"""Model folders written by runs and other tools: a full model, or an adapter with its base inside or elsewhere."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig

from finetune.errors import ModelError
from finetune.model.attention.implementation import default_attention
from finetune.model.layers import unused_modules
from finetune.model.loading.architecture import HEADS, NEW_HEADS
from finetune.model.loading.hub import CONFIG, is_local_path, loading_errors, read_json_settings
from finetune.model.loading.load import keep_positions_exact
from finetune.model.loading.pretrained import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_no_missing_weights,
    load_adapter,
    load_auto_class,
    load_weights,
    read_adapter_config,
    without_warnings,
)
from finetune.runtime.files.read import gguf_advice
from finetune.runtime.run_folder import FINAL_FOLDER
from finetune.runtime.upstream import is_offline, without_hub_retries

BASE_FOLDER = "base"
CONFIG_FOLDER = "config"
"""Folder inside an adapter's folder with the config of the whole model, for heads whose classes the base does not have.

A config.json next to adapter_config.json would make transformers look for a whole model there.
"""

_HEADS_BY_TASK_TYPE = {
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "FEATURE_EXTRACTION": "embedding",
}
_EMBEDDING_NAME = re.compile(r"\.(embed_tokens|wte|word_embeddings|embed_in|shared|lm_head)\.(base_layer\.)?weight$")
_CLASSIFIER_NAME = re.compile(r"\.(score|classifier|classification_head)(\.\w+)*\.weight$")


@dataclass(frozen=True)
class SavedModel:
    """A model folder that has been inspected, but not loaded."""

    folder: Path
    adapter: Mapping[str, Any] | None  # the content of its adapter_config.json
    base: str  # folder or hub name of the whole model: the folder itself if there is no adapter
    config: PreTrainedConfig  # of the whole model, with the labels from training
    head: str

    @property
    def can_generate(self) -> bool:
        """Return whether the model generates text."""
        return self.head in ("causal_lm", "seq2seq_lm", "image_text_to_text")

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its classes in order."""
        return tuple(str(name) for _, name in sorted(self.config.id2label.items()))


def find_model_folder(folder: Path) -> Path | None:
    """Return the folder or its `final/`, whichever contains a model; None if neither does."""
    for candidate in (folder, folder / FINAL_FOLDER):
        if (candidate / CONFIG).is_file() or (candidate / ADAPTER_CONFIG).is_file():
            return candidate.absolute()
    return None


def inspect_model_folder(folder: Path, *, key: str, trust_remote_code: bool = False) -> SavedModel:
    """Return the model in the folder (or its `final/`); raises ModelError, which names `key`, if there is none."""
    path = find_model_folder(folder)
    if path is None:
        if advice := gguf_advice(folder):
            raise ModelError(f"{key}: {advice}")
        problem = (
            "contains no model (neither config.json nor adapter_config.json)" if folder.is_dir() else "does not exist"
        )
        raise ModelError(f"The folder {folder} {problem}. Use the `final/` folder of a finished run.")
    with loading_errors(str(path), key=key):
        adapter = read_adapter_config(path) if (path / ADAPTER_CONFIG).is_file() else None
        base = str(path)
        if (path / BASE_FOLDER / CONFIG).is_file() and adapter is not None:  # of a run that built its own
            base = str(path / BASE_FOLDER)
        elif adapter is not None:
            base = adapter.get("base_model_name_or_path") or ""
            if not base:
                raise ValueError("its adapter_config.json names no base model (`base_model_name_or_path`).")
        has_own_config = adapter is not None and (path / CONFIG_FOLDER / CONFIG).is_file()
        config_source = str(path / CONFIG_FOLDER) if has_own_config else base
        with without_hub_retries(is_local=is_local_path(config_source)):
            config = load_auto_class(
                AutoConfig,
                config_source,
                trust_remote_code=trust_remote_code,
                local_files_only=is_local_path(config_source) or is_offline(),
            )
        head = _infer_head(config, adapter)
        has_weights = (path / ADAPTER_WEIGHTS).is_file()
        if adapter is not None and head in NEW_HEADS and not has_own_config and has_weights:
            with safe_open(path / ADAPTER_WEIGHTS, framework="pt") as file:
                names = [name for name in sorted(file.keys()) if _CLASSIFIER_NAME.search(name)]
                matrices = [shape for name in names if len(shape := file.get_slice(name).get_shape()) == 2]
            if matrices and (number := int(matrices[-1][0])):
                config.num_labels = number  # named LABEL_0 etc., since the folder has no names
        if not all(isinstance(label, str) for label in config.id2label.values()):
            raise ValueError("`id2label` in its config.json contains values that are not names")
    return SavedModel(path, adapter, base, config, head)


def load_saved_model(saved: SavedModel, *, key: str, dtype: str = "auto", trust_remote_code: bool = False) -> Any:
    """Return the model in evaluation mode on the CPU; one with an adapter is a PeftModel. Raises ModelError."""
    model = load_saved_base(saved, key=key, dtype=dtype, trust_remote_code=trust_remote_code)
    if saved.adapter is None:
        return model
    return _attach(model, {"default": saved.folder}, key=key)


def load_saved_base(saved: SavedModel, *, key: str, dtype: str = "auto", trust_remote_code: bool = False) -> Any:
    """Return the whole model without the adapter, with its vocabulary resized for the adapter."""
    brings_head = saved.adapter is not None and saved.head in NEW_HEADS  # otherwise the base must be complete
    silence = without_warnings() if brings_head else nullcontext()
    with loading_errors(saved.base, key=key), without_hub_retries(is_local=is_local_path(saved.base)), silence:
        model, loading = load_weights(
            HEADS[saved.head],
            saved.base,
            config=saved.config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=default_attention(saved.config),
            trust_remote_code=trust_remote_code,
            ignore_mismatched_sizes=brings_head,
            output_loading_info=True,
            local_files_only=is_local_path(saved.base) or is_offline(),
        )
        if not brings_head:
            unused = tuple(f"{name}." for name in unused_modules(model))
            loading["missing_keys"] = [name for name in loading["missing_keys"] if not name.startswith(unused)]
            check_no_missing_weights(loading, saved.base, key=key)
    if saved.adapter is not None:
        with loading_errors(str(saved.folder), key=key):
            sizes = [0]  # the number of embeddings that the adapter's own rows need
            if (saved.folder / ADAPTER_WEIGHTS).is_file():
                with safe_open(saved.folder / ADAPTER_WEIGHTS, framework="pt") as file:
                    names = [name for name in file.keys() if _EMBEDDING_NAME.search(name)]  # noqa: SIM118  # not a dict
                    sizes += [int(file.get_slice(name).get_shape()[0]) for name in names]
            indices = saved.adapter.get("trainable_token_indices") or saved.adapter.get("token_indices") or ()
            lists = indices.values() if isinstance(indices, dict) else (indices,)
            size = int(max([*sizes, *(max(tokens) + 1 for tokens in lists if tokens)]))
            if size and size > model.get_input_embeddings().num_embeddings:
                model.resize_token_embeddings(size, mean_resizing=False)
    if torch.cuda.is_available():
        keep_positions_exact(model)
    return model.eval()


def attach_adapters(model: Any, folders: Mapping[str, Path], *, key: str) -> Any:
    """Return the model with the adapters of these folders by name, the first one active.

    Raises ModelError, also if one was trained with other values in the base's config than the model has.
    """
    values: dict[str, dict[str, Any]] = {}  # of the configs that adapters bring for their base
    for name, folder in folders.items():
        path = folder / CONFIG_FOLDER / CONFIG
        content = read_json_settings(path) if path.is_file() else {}
        values[name] = {field: value for field, value in content.items() if field not in _NO_VALUES}
    own = {name: value for name, value in model.config.to_dict().items() if name not in _NO_VALUES}
    for name, adapter_values in values.items() if any(values.values()) else ():
        changed = sorted(field for field, value in adapter_values.items() if field in own and own[field] != value)
        if changed or not adapter_values:
            other = f"other values of {', '.join(changed[:5])}" if changed else "fewer changes of its base's config"
            raise ModelError(
                f"{key}: the adapter {folders[name]} was trained with {other} than this model has. Load it separately."
            )
    return _attach(model, folders, key=key)


def _attach(model: Any, folders: Mapping[str, Path], *, key: str) -> Any:
    adapted = model
    for name, folder in folders.items():
        with loading_errors(str(folder), key=key):
            if not (folder / ADAPTER_CONFIG).is_file():
                raise ValueError("it has no adapter_config.json.")
            adapted = load_adapter(adapted, folder, name=name)
    return adapted.eval()


# fmt: off
_NO_VALUES = frozenset({
    "architectures", "dtype", "torch_dtype", "use_cache", "transformers_version", "_name_or_path", "name_or_path",
    "quantization_config", "id2label", "label2id", "problem_type", "pad_token_id", "tie_word_embeddings", "vocab_size",
})
# fmt: on
"""Parts of a config that may differ between adapters of one base."""


def _infer_head(config: PreTrainedConfig, adapter: Mapping[str, Any] | None) -> str:
    """Return the head for which the adapter was trained, else the head of the saved class."""
    if adapter is not None and adapter.get("task_type") in _HEADS_BY_TASK_TYPE:
        return _HEADS_BY_TASK_TYPE[adapter["task_type"]]
    classes = list(getattr(config, "architectures", None) or ())
    if adapter is not None and isinstance(adapter.get("auto_mapping"), dict):
        classes.insert(0, adapter["auto_mapping"].get("base_model_class"))
    for head, auto_class in HEADS.items():
        names = auto_class._model_mapping._model_mapping.get(config.model_type, ())
        if set(classes) & set((names,) if isinstance(names, str) else names):
            return head
    return "causal_lm"
