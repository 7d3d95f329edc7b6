"""Uploads an exported folder to the Hugging Face hub, with the token of HF_TOKEN or of `hf auth login`."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: of whichever client it is built on
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from finetune.errors import HubError
from finetune.runtime.hub import is_offline
from finetune.runtime.text.redact import redacted_text

_FORBIDDEN = (401, 403)


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder as one commit and return the repository's URL; the repository is created if it does not exist.

    Raises HubError with the remedy; the folder is not changed.
    """
    if is_offline():
        raise HubError(_message(folder, repository, "the hub cannot be reached."))
    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload model")
    except HFValidationError as error:
        reason = f"this is not a repository name ({_first_line(error)}). Write `name` or `organization/name`."
        raise HubError(_message(folder, repository, reason)) from error
    except LocalTokenNotFoundError as error:
        raise HubError(_message(folder, repository, _log_in())) from error
    except HfHubHTTPError as error:
        is_forbidden = error.response is not None and error.response.status_code in _FORBIDDEN
        reason = f"{_first_line(error)} {_log_in()}" if is_forbidden else _first_line(error)
        raise HubError(_message(folder, repository, reason)) from error
    except (OfflineModeIsEnabled, HTTPError, OSError, ValueError) as error:
        raise HubError(_message(folder, repository, _first_line(error))) from error
    return str(address)


def _message(folder: Path, repository: str, reason: str) -> str:
    command = f"finetune export {folder} --push-to-hub {repository}"
    return f"`{repository}` was not uploaded: {reason} The model is in {folder}. To retry: {command}"


def _log_in() -> str:
    return "Set HF_TOKEN to a token with write access, or log in with `hf auth login`."


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in redacted_text(str(error)).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."
