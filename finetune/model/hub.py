"""Names and folders: where a model or tokenizer comes from, and what to say when it does not come."""

import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError

from finetune.errors import ModelError

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def is_folder(name: str) -> bool:
    """Tell whether the config means a folder: hub names never begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def located(name: str, *, key: str) -> str:
    """Return the name as transformers wants it: a hub name as it is, a folder in full; raises ModelError if absent."""
    if not is_folder(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"{key}: there is no folder {folder}. A hub name is written without a leading `.`, `/` or `~`."
        )
    return str(folder)


@functools.cache
def is_offline() -> bool:
    """Tell whether the hub is out of reach: asked to be (HF_HUB_OFFLINE), or no connection opens within 3 seconds.

    Asked once per process, because huggingface_hub retries for most of a minute before it gives up.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}:
        return True
    if any(os.environ.get(name) for name in PROXIES):
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "huggingface.co", port), timeout=3).close()
    except OSError:
        return True
    return False


@contextmanager
def without_vain_retries(name: str) -> Iterator[None]:
    """Meanwhile ask the hub nothing when `name` is a folder or the hub is out of reach.

    `local_files_only` is not enough: transformers 5.23 does not hand it on when it looks for an adapter, and
    huggingface_hub 2.4 fetches a list of agents before its first download. What HF_HUB_OFFLINE=1 sets stops both.
    """
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or is_folder(name) or is_offline()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def told(name: str, *, key: str) -> Iterator[None]:
    """Turn what transformers raises while it reads `name` into one ModelError that says what to do next."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, StrictDataclassError) as error:
        raise ModelError(f"{key}: `{name}` cannot be loaded: {summary(error)} {_advice(name, error)}") from error


def summary(error: BaseException) -> str:
    """Return the first telling lines of an exception's text as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:400] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _advice(name: str, error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return "It brings its own Python code: read it, then write `model.trust_remote_code: true`."
    if is_folder(name):
        return "Check that the folder holds what `save_pretrained` writes."
    if is_offline():
        return (
            "The hub is out of reach from here and the name is not in the local cache: download it where there is a "
            "network (`hf download`), or write the path of a folder."
        )
    return "Check the spelling and `model.revision`; for a gated or private model log in with `hf auth login`."
