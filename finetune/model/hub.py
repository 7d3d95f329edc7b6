"""Names and folders: where a model or tokenizer comes from, and what to say when it does not come."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError

from finetune.errors import ModelError
from finetune.runtime.hub import is_offline


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
    if not isinstance(error, OSError):
        return "Check the values in its config.json."
    if is_offline():
        return (
            "The hub is out of reach from here and the name is not in the local cache: download it where there is a "
            "network (`hf download`), or write the path of a folder."
        )
    return "Check the spelling and `model.revision`; for a gated or private model log in with `hf auth login`."
