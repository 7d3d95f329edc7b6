"""Hub names and folders of models and tokenizers, and one error message for any failure to load them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.errors import FinetuneError, ModelError
from finetune.model.loading.model_files import PICKLE_ADVICE, REMOTE_CODE_ADVICE, damaged_file, is_panic
from finetune.runtime.hub import is_offline


def is_local_path(name: str) -> bool:
    """Return whether the name is a path: hub names never begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~"))


def resolve_name(name: str, *, key: str) -> str:
    """Return a hub name unchanged and a path expanded; raises ModelError if the folder does not exist."""
    if not is_local_path(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{key}: the folder {folder} does not exist. A hub name has no leading `.`, `/` or `~`.")
    return str(folder)


@contextmanager
def loading_errors(name: str, *, key: str) -> Iterator[None]:
    """Turn any error while libraries load `name` into one ModelError with advice.

    Damaged files cause errors of any type, and Rust panics, which are not Exceptions.
    """
    try:
        yield
    except FinetuneError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # such as KeyboardInterrupt
        raise ModelError(f"{key}: `{name}` cannot be loaded: {_failure_reason(name, error)}") from error


def error_summary(error: BaseException) -> str:
    """Return the first two lines of an exception's text as one sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2])[:400] or type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _failure_reason(name: str, error: BaseException) -> str:
    text = str(error)
    if "trust_remote_code" in text or "execute custom code" in text:
        return REMOTE_CODE_ADVICE
    if "use_safetensors=True" in text:
        return f"it has no safetensors. If it has weights at all, {PICKLE_ADVICE}"
    if "ignore_mismatched_sizes" in text:
        return (
            "the sizes in its config.json do not match its weights (see above): one of them belongs to another model."
        )
    if is_local_path(name):
        damage = damaged_file(Path(name).expanduser())
        advice = damage or "Check that the folder contains what `save_pretrained` writes."
    elif not isinstance(error, OSError):
        advice = (
            "Check the values in its config.json. If you have not changed them, its files in the local cache may be "
            "damaged: delete them (`hf cache rm`) and download them again."
        )
    elif is_offline():
        advice = (
            "The hub cannot be reached and the name is not in the local cache: download it on a machine with network "
            "access (`hf download`), or give the path of a folder."
        )
    else:
        advice = "Check the spelling and `model.revision`; for a gated or private model log in with `hf auth login`."
    type_name = f"{type(error).__name__}: " if isinstance(error, LookupError | TypeError | AttributeError) else ""
    return f"{type_name}{error_summary(error)} {advice}"
