"""The folder of an adapter that was saved before, read without peft: its config and what its weights are known by."""

import hashlib
from pathlib import Path
from typing import Any

from finetune.errors import ModelError
from finetune.model.hub import is_folder
from finetune.model.pretrained import read_adapter

KEY = "model.adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"


def adapter_digest(folder: str | None) -> str | None:
    """Return what tells the adapter apart that training begins from; None where there is none. Reads all of it."""
    if folder is None:
        return None
    try:
        with (Path(folder) / WEIGHTS_FILE).open("rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise ModelError(f"{KEY}: {folder}/{WEIGHTS_FILE} cannot be read: {error.strerror}.") from error


def base_note(folder: str, *, name: str | None) -> str | None:
    """Return a sentence where the adapter names another base than the model's; None where it is the same.

    Raises ModelError where both are names on the hub: then they are two models for certain.
    """
    base = read_config(Path(folder)).get("base_model_name_or_path")
    if not base or name is None or base == name or (is_folder(name) and Path(base) == Path(name).expanduser()):
        return None
    if not is_folder(name) and not Path(base).is_absolute():
        raise ModelError(f"{KEY}: {folder} was trained on `{base}`, and model.name is `{name}`. Name the same base.")
    return f"warning: {KEY}: {folder} was trained on `{base}`, and model.name is `{name}`. Are they the same weights?"


def read_config(folder: Path) -> dict[str, Any]:
    """Return what the folder's adapter_config.json says; raises ModelError where there is none, or a bad one."""
    if not (folder / CONFIG_FILE).is_file():
        raise ModelError(
            f"{KEY}: {folder} holds no adapter: {CONFIG_FILE} cannot be read. Name a folder that was exported by a "
            "run with adapters, such as `runs/NAME/final`."
        )
    return read_adapter(folder)
