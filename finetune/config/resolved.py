"""A run's config read back from its folder, long after its start and perhaps on another machine."""

import pathlib
from collections.abc import Sequence

from pydantic import ValidationError

from finetune.config.limits import MAX_FILE_BYTES, MAX_RESOLVED_VALUES
from finetune.config.load import LoadedConfig
from finetune.config.overrides import override
from finetune.config.paths import is_url, with_absolute_paths
from finetune.config.run_config import RunConfig, with_run_folder
from finetune.config.text_file import read_text
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, UserError

RESOLVED = "resolved.yaml"
ANEW = "Start the run once more, which writes the file anew."


def load_resolved(run: pathlib.Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Return the config that the run in this folder was started with, its folder being this one.

    Overrides are laid over it; their relative paths count from the current folder. Nothing that it names is looked for:
    data and model may be gone. Raises UserError where there is no such file, or where another version of finetune wrote
    it, ConfigError for overrides that are none.
    """
    path = run / RESOLVED
    try:
        text = read_text(path, max_bytes=8 * MAX_FILE_BYTES)
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"{path}: cannot be read ({why}). Name the folder of a run: what it was is written there."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is damaged: it is not UTF-8 text. {ANEW}") from error
    document = read_yaml(text, max_values=MAX_RESOLVED_VALUES)
    if document.problems or not isinstance(document.values, dict):
        fault = document.problems[0] if document.problems else "it does not hold sections."
        raise UserError(f"{path}: is damaged: {fault} {ANEW}")
    overridden = override(document.values, overrides)
    if overridden.problems:
        raise ConfigError(overridden.problems, path.name)
    try:
        config = with_absolute_paths(RunConfig.model_validate(overridden.values), pathlib.Path.cwd())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        if overrides:
            raise UserError(f"--set: {place}: {first['msg']}.") from error
        raise UserError(
            f"{path}: was written by another version of finetune: {place}: {first['msg']}. Use that version "
            "(environment.json names it), or start the run once more with this one, which writes the file anew."
        ) from error
    remote = config.run.folder if is_url(config.run.folder) else None
    return LoadedConfig(with_run_folder(config, str(run.absolute())), path, text, {}, remote)
