"""The digest of frozen weights: what was learnt on top of them means nothing on top of others."""

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from finetune.config.sections.model import ModelSection
from finetune.errors import ModelError
from finetune.model.adapters.wish import adapter_wish
from finetune.model.hub import is_folder, located
from finetune.runtime.amounts import size_text
from finetune.runtime.digests import sha256_digest

WEIGHTS = ("*.safetensors", "*.bin")
"""The files of weights, the kind that is preferred first; the other kind is not read when both are there."""

_THREADS = 8
_WORTH_TELLING_SECONDS = 2.0


def base_digest(
    section: ModelSection, *, model: Any, is_reference: bool = False, say: Callable[[str], None]
) -> str | None:
    """Return what identifies the frozen weights, or None where nothing is frozen or they are drawn from the seed.

    Weights that are the reference of a loss count as frozen. As `weights_digest`: call it on one rank.
    """
    is_frozen = adapter_wish(section) is not None or section.freeze or section.train_only or is_reference
    if section.name is None or not is_frozen:
        return None
    return weights_digest(section, model=model, say=say)


def weights_digest(section: ModelSection, *, model: Any, say: Callable[[str], None]) -> str:
    """Return what identifies the weights of `model.name`.

    For a folder that is a SHA-256 over its weights and config.json, wherever it lies; for a hub model the commit that
    was loaded, found without a network. May read every byte of a folder's weights: call it on one rank.
    """
    if is_folder(str(section.name)):
        return folder_digest(Path(located(str(section.name), key="model.name")), say=say)
    commit = getattr(getattr(model, "config", None), "_commit_hash", None) or _cached_commit(section)
    if commit is None:
        say(f"model.name: the commit of `{section.name}` is not known, so a change of it would not be seen on a resume")
    return f"commit {commit or 'unknown'}"


def folder_digest(folder: Path, *, say: Callable[[str], None]) -> str:
    """Return a digest over the digests of the files of weights and configs by name; raises ModelError.

    They are listed as `sha256sum` would. Reads every byte of what was written since the last time: call it on one rank.
    """
    started = time.monotonic()
    files = sorted(_files(folder))
    try:
        with ThreadPoolExecutor(_THREADS) as threads:  # hashing releases the lock
            digests = list(threads.map(sha256_digest, files))
        size = sum(path.stat().st_size for path in files)
    except OSError as error:
        raise ModelError(f"model.name: {error.filename or folder} cannot be read: {error.strerror}.") from error
    listed = "".join(f"{digest}  {path.name}\n" for path, digest in zip(files, digests, strict=True))
    whole = hashlib.sha256(listed.encode()).hexdigest()
    seconds = time.monotonic() - started
    if seconds > _WORTH_TELLING_SECONDS:
        say(f"base weights {whole[:12]}: read {size_text(size)} of {folder} in {seconds:.0f} s to tell them by")
    return f"sha256 {whole}"


def _files(folder: Path) -> Iterator[Path]:
    yield from folder.glob("config.json")
    yield from folder.glob("adapter_config.json")
    for pattern in WEIGHTS:
        weights = list(folder.glob(pattern))
        if weights:
            yield from weights
            yield from folder.glob(f"{pattern}.index.json")
            return


def _cached_commit(section: ModelSection) -> str | None:
    """Return the commit whose config.json lies in the local cache; its folder is named after it."""
    path = try_to_load_from_cache(
        str(section.name), "config.json", cache_dir=section.cache_folder, revision=section.revision
    )
    return Path(path).parent.name if isinstance(path, str) else None
