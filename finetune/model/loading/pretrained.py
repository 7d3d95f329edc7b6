"""The only module that loads configs, tokenizers, processors, models and adapters from files.

Remote code runs only if the job allows it, there are no prompts on standard input, and weights are safetensors. A test
verifies that `from_pretrained`, `from_config` and `torch.load` are called nowhere else. peft is imported only when an
adapter is loaded, not for reading its config or digest.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.loading.hub import (
    INDEX,
    PICKLE_ADVICE,
    PICKLES,
    WEIGHTS,
    check_index,
    check_matrix_sizes,
    check_model_files,
    check_tokenizer,
    is_local_path,
    loading_errors,
    read_json_settings,
    resolve_name,
)
from finetune.model.upstream import data_only_loading
from finetune.registry.model_choices import POOLING_MODES
from finetune.runtime.optional import lazily
from finetune.runtime.upstream import is_offline, without_hub_retries

with lazily():
    from peft import config as peft_config
    from peft import peft_model

ADAPTER_KEY = "model.adapter"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"

_SETTINGS_THAT_LOAD_OTHERS = ("megatron_config", "shadow_model", "adapters", "prompt_tuning_init_state_dict_path")
"""Settings of peft 0.18 to 0.21 that import a module, or load another model, adapter or file by name."""

_INITS_FROM_FILES = ("corda", "lora_ga")
"""LoRA initializations for which peft reads pickles that the adapter's config names."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress transformers' warnings in this context."""
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(previous)


def load_auto_class(auto_class: Any, source: str | Path, *, trust_remote_code: bool, **options: Any) -> Any:
    """Return the config, tokenizer or processor that the Auto class loads from a folder or hub name.

    Raises ModelError for untrusted code and damaged files; exceptions from transformers propagate.
    """
    if Path(source).is_dir():
        check_model_files(Path(source))
    with data_only_loading(trust_remote_code=trust_remote_code):
        loaded = auto_class.from_pretrained(str(source), trust_remote_code=trust_remote_code, **options)
    check_tokenizer(loaded, str(source))
    limit = getattr(loaded, "model_max_length", 0)
    if not isinstance(limit, int | float):
        raise ModelError(
            f"{source}: `model_max_length` in its tokenizer_config.json is {limit!r:.80}, which is not a number."
        )
    return loaded


def load_named(auto_class: Any, name: str, *, key: str, section: ModelSection, revision: str | None = None) -> Any:
    """Return what the Auto class loads by this hub name or from this folder, for a model of the section.

    Raises ModelError, which names `key`.
    """
    with loading_errors(name, key=key), without_hub_retries(is_local=is_local_path(name)):
        return load_auto_class(
            auto_class,
            resolve_name(name, key=key),
            revision=revision,
            cache_dir=section.cache_folder,
            trust_remote_code=section.trust_remote_code,
            local_files_only=is_local_path(name) or is_offline(),
        )


def read_config_content(
    config: PreTrainedConfig, source: str | Path, *, trust_remote_code: bool, **options: Any
) -> dict[str, Any]:
    """Return the content of the config.json from which `config` was loaded with the same arguments."""
    with data_only_loading(trust_remote_code=trust_remote_code):
        content, _ = type(config).get_config_dict(str(source), **options)
    return dict(content)


def load_trained_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return a tokenizer that this package trained and saved; class names in its files are ignored."""
    check_model_files(folder)
    with data_only_loading(trust_remote_code=False):
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)


def load_weights(head: Any, source: str, *, config: PreTrainedConfig, trust_remote_code: bool, **options: Any) -> Any:
    """Return the model with that head and its weights; raises like `load_auto_class`, and for untrusted pickles.

    Trusted pickles are loaded with `weights_only`, and only if there are no safetensors.
    """
    check_loadable(Path(source), trust_remote_code=trust_remote_code)
    if Path(source).is_dir():
        check_matrix_sizes(Path(source), config)
    file = getattr(config, "transformers_weights", None)
    if file is not None and not str(file).endswith((".safetensors", ".safetensors.index.json")):
        raise ModelError(
            f"{source}: its config names {file!r} as weights (`transformers_weights`), which is not a safetensors file."
        )
    with data_only_loading(trust_remote_code=trust_remote_code):
        return head.from_pretrained(
            source,
            config=config,
            trust_remote_code=trust_remote_code,
            use_safetensors=None if trust_remote_code else True,
            weights_only=True,
            **options,
        )


def placed_on(device: torch.device | None) -> dict[str, Any]:
    """Return the option of `load_weights` that loads weights directly to the device; empty for None and the CPU."""
    return {} if device is None or device.type == "cpu" else {"device_map": {"": device}}


def check_no_missing_weights(loading: Mapping[str, Any], name: str, *, key: str) -> None:
    """Raise ModelError if the weights lack parameters of the model, which would be random."""
    missing = sorted({*loading["missing_keys"], *(name for name, *_ in loading.get("mismatched_keys", ()))})
    if missing:
        raise ModelError(
            f"{key}: the weights of `{name}` lack {len(missing)} of the model's parameters ({', '.join(missing[:3])}, "
            "...), which would be random. Use a model that was saved completely, with this head."
        )


def check_loadable(source: Path, *, trust_remote_code: bool) -> None:
    """Raise ModelError, which names the file, if a folder's files are damaged or untrusted pickles."""
    if not source.is_dir():
        return
    check_model_files(source)
    if (source / WEIGHTS).is_file():
        return
    if (source / INDEX).is_file():
        check_index(source / INDEX)
        return
    pickles = [name for name in PICKLES if (source / name).is_file()]
    if pickles and not trust_remote_code:
        raise ModelError(f"{source / pickles[0]}: {PICKLE_ADVICE}")


def build_from_config(head: Any, config: PreTrainedConfig, *, trust_remote_code: bool, **options: Any) -> Any:
    """Return an uninitialized model with that head; raises like `load_auto_class`."""
    with data_only_loading(trust_remote_code=trust_remote_code):
        return head.from_config(config, trust_remote_code=trust_remote_code, **options)


def load_adapter_config(folder: Path) -> Any:
    """Return peft's config of the adapter in the folder; raises ModelError if it refers to other files."""
    check_model_files(folder)
    read_adapter_config(folder)
    with data_only_loading(trust_remote_code=False):
        return peft_config.PeftConfig.from_pretrained(str(folder))


def load_adapter(model: Any, folder: Path, *, name: str) -> Any:
    """Return the model with the folder's adapter under that name; raises ModelError like `load_adapter_config`."""
    if not (folder / ADAPTER_WEIGHTS).is_file():
        advice = PICKLE_ADVICE if (folder / ADAPTER_PICKLE).is_file() else "copy it again from its source."
        raise ModelError(f"{folder}: {ADAPTER_WEIGHTS} is missing: {advice}")
    check_model_files(folder)
    read_adapter_config(folder)
    with data_only_loading(trust_remote_code=False):
        if isinstance(model, peft_model.PeftModel):
            model.load_adapter(str(folder), adapter_name=name)
            return model
        return peft_model.PeftModel.from_pretrained(model, str(folder), adapter_name=name)


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's adapter_config.json.

    Raises ModelError if it is damaged, or would make peft load anything other than the adapter's own weights.
    """
    path = folder / ADAPTER_CONFIG
    settings = read_json_settings(path)
    for key in ("peft_type", "base_model_name_or_path", "task_type"):
        if not isinstance(settings.get(key), str | None):
            raise ModelError(f"{path}: the file is damaged: `{key}` is {settings.get(key)!r:.80}.")
    for key in _SETTINGS_THAT_LOAD_OTHERS:
        if settings.get(key):
            raise ModelError(
                f"{path}: `{key}` would make peft load something other than this adapter, which is not supported. "
                "Remove the key in a copy, or merge the adapter in an environment that you trust."
            )
    init = settings.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_INITS_FROM_FILES):
        raise ModelError(
            f"{path}: `init_lora_weights: {init}` makes peft read initial values from files. Save the adapter with "
            "`path_initial_model_for_weight_conversion`, which converts it to a plain LoRA."
        )
    return settings


def adapter_digest(folder: str | None) -> str | None:
    """Return the digest of the initial adapter's weights, None without one. Reads the whole file."""
    if folder is None:
        return None
    try:
        with (Path(folder) / ADAPTER_WEIGHTS).open("rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise ModelError(f"{ADAPTER_KEY}: {folder}/{ADAPTER_WEIGHTS} cannot be read: {error.strerror}.") from error


def base_mismatch_warning(folder: str, *, name: str | None) -> str | None:
    """Return a warning if the adapter names a different base than `model.name`; None if it is the same.

    Raises ModelError if both are hub names, which are certainly different models.
    """
    base = read_saved_adapter_config(Path(folder)).get("base_model_name_or_path")
    if not base or name is None or base == name or (is_local_path(name) and Path(base) == Path(name).expanduser()):
        return None
    if not is_local_path(name) and not Path(base).is_absolute():
        raise ModelError(
            f"{ADAPTER_KEY}: {folder} was trained on `{base}`, and model.name is `{name}`. Use the same base."
        )
    return (
        f"warning: {ADAPTER_KEY}: {folder} was trained on `{base}`, and model.name is `{name}`. Are they the "
        "same weights?"
    )


def read_saved_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's adapter_config.json; raises ModelError if it is missing or invalid."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{ADAPTER_KEY}: {folder} contains no adapter: {ADAPTER_CONFIG} is missing. Use a folder that was "
            "exported by a run with adapters, such as `runs/NAME/final`."
        )
    return read_adapter_config(folder)


_POOLING_FILE = "1_Pooling/config.json"


def pooling_warning(section: ModelSection, pooling: str) -> str | None:
    """Return a warning if the files of a sentence-transformers model name another pooling than this one.

    None as well if they name none, several or an unknown one.
    """
    if section.name is None:
        return None
    try:
        if is_local_path(section.name):
            path: Any = Path(resolve_name(section.name, key="model.name")) / _POOLING_FILE
        else:
            path = cached_file(
                section.name,
                _POOLING_FILE,
                revision=section.revision,
                cache_dir=section.cache_folder,
                local_files_only=is_offline(),
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        settings: Any = None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict):
        return None
    mode = settings.get("pooling_mode")
    names = [name for name, key in POOLING_MODES.items() if mode == name.replace("_", "") or settings.get(key)]
    if len(names) != 1 or names[0] == pooling:
        return None
    return (
        f"warning: task.embedding.pooling: `{section.name}` was trained with `{names[0]}` pooling, according to "
        f"its {_POOLING_FILE}, but this job uses `{pooling}`. To keep its vectors, write `pooling: {names[0]}`."
    )
