"""Checks once and quickly whether the Hugging Face hub can be reached."""

import functools
import os
import socket
from urllib.parse import urlsplit

PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@functools.cache
def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set or no connection to the hub opens within 3 seconds.

    Checked once per process, because huggingface_hub retries for most of a minute before it gives up.
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
