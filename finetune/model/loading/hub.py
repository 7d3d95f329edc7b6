"""Hub names and folders of models and tokenizers, and one error message for whatever fails while they are loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import FinetuneError, ModelError
from finetune.model.loading.model_files import PICKLE_ADVICE, REMOTE_CODE_ADVICE, damaged_file, is_panic
from finetune.runtime.hub import is_offline


def is_local_path(name: str) -> bool:
    """Tell whether the config means a folder: hub names never begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def resolve_name(name: str, *, key: str) -> str:
    """Return the name as transformers wants it: a hub name as it is, a folder in full; raises ModelError if absent."""
    if not is_local_path(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(
            f"{key}: there is no folder {folder}. A hub name is written without a leading `.`, `/` or `~`."
        )
    return str(folder)


@contextmanager
def loading_errors(name: str, *, key: str) -> Iterator[None]:
    """Turn what is raised while libraries read `name` into one ModelError that says what to do next.

    Damaged files make them raise errors of every type, and Rust panics, which are no Exceptions.
    """
    try:
        yield
    except FinetuneError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # Ctrl-C and the like
        raise ModelError(f"{key}: `{name}` cannot be loaded: {_failure_reason(name, error)}") from error


def error_summary(error: BaseException) -> str:
    """Return the first telling lines of an exception's text as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:400] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _failure_reason(name: str, error: BaseException) -> str:
    text = str(error)
    if "trust_remote_code" in text or "execute custom code" in text:
        return REMOTE_CODE_ADVICE
    if "use_safetensors=True" in text:
        return f"there are no safetensors. Where it has weights at all, {PICKLE_ADVICE}"
    if "ignore_mismatched_sizes" in text:
        return (
            "the sizes in its config.json are not those of its weights, which are listed above: one of the two is "
            "another model's."
        )
    kind = f"{type(error).__name__}: " if isinstance(error, LookupError | TypeError | AttributeError) else ""
    return f"{kind}{error_summary(error)} {_failure_advice(name, error)}"


def _failure_advice(name: str, error: BaseException) -> str:
    if is_local_path(name):
        damage = damaged_file(Path(name).expanduser())
        return damage or "Check that the folder holds what `save_pretrained` writes."
    if not isinstance(error, OSError):
        return (
            "Check the values in its config.json. Where you have changed none, its files in the local cache may be "
            "damaged: delete them (`hf cache rm`) and download them anew."
        )
    if is_offline():
        return (
            "The hub is out of reach from here and the name is not in the local cache: download it where there is a "
            "network (`hf download`), or write the path of a folder."
        )
    return "Check the spelling and `model.revision`; for a gated or private model log in with `hf auth login`."
