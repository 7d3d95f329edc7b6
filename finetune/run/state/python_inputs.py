"""Rows, models and tokenizers that a caller gives as Python objects become files in the run folder: `given/`.

Each is named after a digest of its content. So a job that names these files has the fingerprints of any other job,
other ranks and other strategies read the same, and a resume with other content is refused.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from finetune.errors import DataError, ModelError
from finetune.model.processing import TOKENIZER_FILES
from finetune.runtime.files.atomic import build_once, temporary_path
from finetune.runtime.optional import no_op
from finetune.runtime.resources import disk_errors

GIVEN_FOLDER = "given"

_DIGITS = 16
_SET_BY_SAVING = ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path")


def write_rows(given: Any, folder: Path, *, key: str) -> Path:
    """Write a `datasets.Dataset`, an iterable of dicts, or the result of a function without arguments; return the file.

    Raises DataError where there are no rows, or where one is not a dict of what JSON can hold.
    """
    rows: Any = given() if callable(given) else given
    name = type(rows).__name__
    if isinstance(rows, Mapping) and hasattr(rows, "num_rows"):
        raise DataError(f"{key}: a `{name}` has several splits. Give one of them: {', '.join(map(repr, rows))}.")
    is_table = name == "Dataset" and hasattr(rows, "to_parquet")
    if not is_table and hasattr(rows, "columns") and hasattr(rows, "iloc"):
        raise DataError(f"{key}: a `{name}` is not an iterable of rows. Write `datasets.Dataset.from_pandas(table)`.")
    if isinstance(rows, str | bytes) or not hasattr(rows, "__iter__"):
        raise DataError(f"{key}: `{name}` is not an iterable of rows. Rows are dicts, in a list or any other iterable.")
    folder.mkdir(parents=True, exist_ok=True)
    staging = temporary_path(folder / "rows")
    try:
        if is_table:
            if len(rows) == 0:
                raise DataError(f"{key}: the dataset has no rows.")
            has_bars = not datasets.are_progress_bars_disabled()
            datasets.disable_progress_bars()
            try:
                rows.to_parquet(str(staging))
            finally:
                if has_bars:
                    datasets.enable_progress_bars()
        else:
            _write_lines(rows, staging, key=key)
        with staging.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        path = folder / f"rows-{digest[:_DIGITS]}.{'parquet' if is_table else 'jsonl'}"
        staging.replace(path)
    finally:
        staging.unlink(missing_ok=True)
    return path


def _write_lines(rows: Iterable[Any], path: Path, *, key: str) -> None:
    number = 0
    with disk_errors([path.parent], DataError), path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"{key}: row {number} is of type `{type(row).__name__}`, not a dict of its columns.")
            try:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(
                    f"{key}: row {number} cannot be written as JSON: {error}. Give text, numbers, lists and dicts, or "
                    "a `datasets.Dataset`."
                ) from error
    if number == 0:
        raise DataError(f"{key}: there are no rows: the iterable is empty, or was read before.")


def find_tokenizer(model: Any) -> Path | None:
    """Return the folder that the model was loaded from, or its files in the hub's cache; None without a tokenizer."""
    name, commit = getattr(model, "name_or_path", ""), getattr(model.config, "_commit_hash", None)
    if not name:
        return None
    for file in TOKENIZER_FILES:
        cached = Path(name, file)
        if not Path(name).is_dir():
            with suppress(HFValidationError):  # neither a folder nor a name on the hub
                cached = Path(str(try_to_load_from_cache(name, file, revision=commit)))
        if cached.is_file():
            return cached.parent.absolute()
    return None


def write_pretrained(model: Any, folder: Path, *, key: str) -> Path:
    """Write a model or a tokenizer as `save_pretrained` does, unless it is there already; return its folder.

    Raises ModelError for a model with an adapter, whose base would be missing, and one without values.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise ModelError(
            f"{key}: this model has a PEFT adapter. Give its base model, and the folder of the adapter as "
            "`model.adapter`, or the settings of a new one as `model.lora`."
        )
    if hasattr(model, "state_dict"):
        # Of the config, but for what `save_pretrained` writes into it, and of all tensors.
        kind, values = "model", {k: v for k, v in model.config.to_dict().items() if k not in _SET_BY_SAVING}
        digest = hashlib.sha256(f"{type(model).__name__} {json.dumps(values, sort_keys=True, default=str)}".encode())
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.is_meta:
                raise ModelError(f"{key}: `{name}` is on the meta device, without values. Load the weights first.")
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    else:
        kind, digest = "tokenizer", hashlib.sha256()
        with TemporaryDirectory(prefix="finetune-") as saved:
            model.save_pretrained(saved)
            for file in sorted(Path(saved).rglob("*")):
                if file.is_file():
                    digest.update(f"{file.relative_to(saved)} {file.stat().st_size} ".encode() + file.read_bytes())
    path = folder / f"{kind}-{digest.hexdigest()[:_DIGITS]}"
    build_once(path, lambda staging: model.save_pretrained(str(staging)), log=no_op)
    return path
