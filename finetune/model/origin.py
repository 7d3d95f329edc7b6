"""Where a model comes from, and what its config says before there is a model."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.architecture import SpecialIds, architecture
from finetune.model.hub import is_folder, located, told
from finetune.model.pretrained import ADAPTER_CONFIG, load_settings
from finetune.runtime.hub import is_offline, without_vain_retries


def config_of(section: ModelSection) -> PreTrainedConfig:
    """Return the config of the model that the section means, its vocabulary aside; raises ModelError."""
    if section.from_config is None:
        return pretrained_config(section)
    return architecture(section.from_config, vocabulary_size=None, special_ids=SpecialIds())


def origin_of(section: ModelSection) -> dict[str, Any]:
    """Return where the model is, as `model.pretrained` takes it; raises ModelError for a folder that holds none."""
    name = section.name or ""
    place = located(name, key="model.name")
    if is_folder(name) and (Path(place) / ADAPTER_CONFIG).exists():
        raise ModelError(
            f"model.name: {place} holds an adapter, not a model. Name the base it was trained on "
            "(`base_model_name_or_path` in its adapter_config.json)."
        )
    return {
        "place": place,
        "revision": section.revision,
        "cache_dir": section.cache_folder,
        "trust_remote_code": section.trust_remote_code,
        "local_files_only": is_folder(name) or is_offline(),
    }


def pretrained_config(section: ModelSection) -> PreTrainedConfig:
    """Return the config of the model that is named; raises ModelError."""
    name, origin = str(section.name), origin_of(section)
    with told(name, key="model.name"), without_vain_retries(is_local=is_folder(name)):
        return load_settings(AutoConfig, **origin)
