"""A job in Python: the sections of a job file, validated by the same rules, with objects in place of files.

Rows, models and tokenizers that stand in a job as objects are replaced by the paths of their files.
"""

import functools
import inspect
import numbers
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from finetune.config.formatting import job_yaml
from finetune.config.load import PYTHON_JOB, LoadedConfig, load_config, load_values
from finetune.config.overrides import override_text
from finetune.config.paths import local_run_folder
from finetune.config.run_config import RunConfig
from finetune.config.section import Section, join_key
from finetune.config.yaml import invalid_characters
from finetune.errors import ConfigError, Problem, UserError, refused_exits
from finetune.runtime.optional import lazily
from finetune.runtime.processes import restored_environment

with lazily():  # torch
    from finetune.run.state import python_inputs

P = ParamSpec("P")
R = TypeVar("R")

Overrides = Mapping[str, Any]
"""Values by dotted key, such as `{"train.learning_rate": 1e-4}`."""


def api_function(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which restores os.environ, and raises UserError for an argument of a wrong name or type."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with restored_environment(), refused_exits():
            _require_types(function, args, kwargs)
            return function(*args, **kwargs)

    return call


def _require_types(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise UserError for a missing argument, or one of another type than annotated; jobs have their own messages."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UserError(f"{function.__name__}: {error}.") from None
    annotations = get_type_hints(function, include_extras=True)
    for name, value in given.items():
        if hasattr(value, "dtype") and hasattr(value, "item"):  # a number of NumPy or torch
            value = value.item()
        try:
            TypeAdapter(Any if name == "job" else annotations[name]).validate_python(value, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, (name, *(part for part in first["loc"] if isinstance(part, int)))))
            message = f"{first['msg'][:1].lower()}{first['msg'][1:]}"
            raise UserError(f"{where}: `{first['input']!r}` cannot stand here: {message}.") from None


GIVEN_JOB = "job-in-python.yaml"
"""The name of the file of a job without one, which other processes read."""


class Job:
    """A job: the sections of a job file as keyword arguments, each a dict or a section object.

    Rows may be given as a `datasets.Dataset`, an iterable of dicts or a function that returns one, wherever a path to
    rows stands; a model and a tokenizer as objects with `save_pretrained`, in place of their names. They are written to
    `given/` in the run folder when the job is used. Relative paths are resolved against the current folder.
    """

    def __init__(
        self,
        *,
        run: Any = None,
        model: Any = None,
        data: Any = None,
        task: Any = None,
        train: Any = None,
        checkpoint: Any = None,
        evaluate: Any = None,
        report: Any = None,
        export: Any = None,
        **others: Any,
    ) -> None:
        """Raise ConfigError with every problem at once; files that the job names must exist."""
        named = {"run": run, "model": model, "data": data, "task": task, "train": train, "checkpoint": checkpoint}
        named |= {"evaluate": evaluate, "report": report, "export": export, **others}
        given = {name: section for name, section in named.items() if section is not None}
        self._values, self._objects, problems = take_objects(given)
        if problems:
            raise ConfigError(problems, PYTHON_JOB.name)
        self._use_tokenizer_of_model()
        self._file: Path | None = None
        self._folder = Path.cwd()
        self._overrides: Overrides = {}
        self._written: dict[str, Path] = {}  # iterators can be read only once
        self._config = self.validated().config

    @classmethod
    def _of_file(cls, path: Path, overrides: Overrides) -> "Job":
        job = cls.__new__(cls)
        job._file, job._folder = path.absolute(), Path.cwd()
        job._values, job._objects = {}, {}
        job._overrides, job._written = dict(overrides), {}
        job._config = job.validated().config
        return job

    @property
    def config(self) -> RunConfig:
        """Return the validated sections: `job.config.train.learning_rate`. Paths in it are absolute."""
        return self._config

    def to_yaml(self) -> str:
        """Return the job as the text of a job file, its paths absolute; objects in it are written to files first."""
        return job_yaml(self.load().config)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write `to_yaml()` to the file and return its path."""
        target = Path(path)
        target.write_text(self.to_yaml(), encoding="utf-8")
        return target

    def validated(self, overrides: Overrides | None = None) -> LoadedConfig:
        """Return the valid job with these overrides; nothing is written, and objects have paths that do not exist."""
        return self._load(overrides or {}, paths=None)

    def load(self, overrides: Overrides | None = None) -> LoadedConfig:
        """Return the valid job with these overrides, the objects in it written to files of the run folder."""
        return self._load(overrides or {}, paths=self._write_objects(overrides or {}))

    def as_file(self, overrides: Overrides, *, folder: Path) -> tuple[Path, list[str]]:
        """Return a job file and overrides that are this job; a job without a file is written to the run folder."""
        if self._file is not None:
            plain = with_paths(self._taken_overrides(overrides)[0], self._write_objects(overrides))
            return self._file, [override_text(key, value) for key, value in plain.items()]
        path = folder / python_inputs.GIVEN_FOLDER / GIVEN_JOB
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(job_yaml(self.load(overrides).config), encoding="utf-8")
        return path, []

    def _use_tokenizer_of_model(self) -> None:
        """Name the tokenizer that a model without one was loaded with, if its files are on this machine."""
        model = self._objects.get("model", self._objects.get("model.name"))
        section = self._values.get("model")
        section = dict(section) if isinstance(section, Mapping) else {"name": section}
        if (
            hasattr(model, "state_dict")
            and "tokenizer" not in section
            and (folder := python_inputs.find_tokenizer(model))
        ):
            self._values["model"] = {**section, "tokenizer": {"name": str(folder)}}

    def _write_objects(self, overrides: Overrides) -> dict[str, str]:
        """Write the objects of a valid job to the run folder and return their paths by dotted key."""
        run = self.validated(overrides).config.run
        objects = {**self._objects, **self._taken_overrides(overrides)[1]}
        folder = local_run_folder(run.folder, run.local_folder) / python_inputs.GIVEN_FOLDER if objects else Path()
        return {key: str(self._write(key, value, folder)) for key, value in objects.items()}

    def _write(self, key: str, value: Any, folder: Path) -> Path:
        if key.startswith("model"):
            return python_inputs.write_pretrained(value, folder, key=key)
        if not isinstance(value, Iterator):
            return python_inputs.write_rows(value, folder, key=key)
        if key not in self._written:
            self._written[key] = python_inputs.write_rows(value, folder, key=key)
        path = folder / self._written[key].name
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._written[key], path)
        return path

    def _taken_overrides(self, overrides: Overrides) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the plain values of job and arguments, and their objects; raises ConfigError for other values."""
        plain: dict[str, Any] = {}
        objects: dict[str, Any] = {}
        for key, value in {**self._overrides, **overrides}.items():
            plain[key], taken, problems = take_objects(value, key=key)
            objects |= taken
            if problems:
                raise ConfigError(problems, "overrides")
        return plain, objects

    def _load(self, overrides: Overrides, *, paths: Mapping[str, str] | None) -> LoadedConfig:
        plain, _ = self._taken_overrides(overrides)
        values = self._values
        if paths is not None:
            plain, values = with_paths(plain, paths), with_paths(values, paths)
        texts = [override_text(key, value) for key, value in plain.items()]
        elsewhere = [Path(_PENDING)]
        if self._file is not None:
            return load_config(self._file, texts, elsewhere=elsewhere)
        return load_values(values, texts, folder=self._folder, elsewhere=elsewhere)

    def __repr__(self) -> str:
        origin = "" if self._file is None else f" from {self._file.name}"
        return f"<Job{origin}: {self._config.task.name} into {self._config.run.folder}>"


JobLike = Job | str | PathLike[str] | Mapping[str, Any]
"""A job, the path of a job file, or the sections of one as a dict."""


@api_function
def load_job(path: str | PathLike[str], *, overrides: Overrides | None = None) -> Job:
    """Return the job in the file, with these overrides (`{"train.steps": 4}`); raises ConfigError with all problems."""
    return Job._of_file(Path(path), overrides or {})


def as_job(job: JobLike) -> Job:
    """Return the job; raises ConfigError for an invalid job, UserError for any other type."""
    if isinstance(job, Job):
        return job
    if isinstance(job, str | PathLike):
        return load_job(job)
    if isinstance(job, Mapping):
        return Job(**job)
    raise UserError(
        f"`{type(job).__name__}` is not a job. Give a Job, the path of a job file, or a dict of its sections."
    )


_ROWS = re.compile(r"data\.(train|validation)(\.mix\.\d+)?(\.path)?")
_PRETRAINED = re.compile(r"model(\.tokenizer)?(\.name)?")
"""Keys at which an object may stand in place of a name, a path or a section with one."""

_PENDING = "/given-in-python"
"""The folder of paths whose files are not written yet."""


def take_objects(value: Any, *, key: str = "") -> tuple[Any, dict[str, Any], list[Problem]]:
    """Return the value as plain YAML values, the objects in it by dotted key, and a problem for each unusable value.

    An object is replaced by a path that does not exist; `with_paths` replaces it by the path of its file.
    """
    objects: dict[str, Any] = {}
    problems: list[Problem] = []
    return _plain(value, key, objects=objects, problems=problems), objects, problems


def with_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """Return plain values with the paths of written objects, by the dotted key of each."""
    if isinstance(value, dict):
        return {name: with_paths(inner, paths) for name, inner in value.items()}
    if isinstance(value, list):
        return [with_paths(inner, paths) for inner in value]
    if isinstance(value, str) and value.startswith(f"{_PENDING}/"):
        return paths[value.removeprefix(f"{_PENDING}/").rpartition(".")[0]]
    return value


def _plain(value: Any, key: str, *, objects: dict[str, Any], problems: list[Problem]) -> Any:
    if is_object(key, value):
        objects[key] = value
        path = f"{_PENDING}/{key}.{'jsonl' if _ROWS.fullmatch(key) else 'model'}"
        return {"path": path} if _ROWS.fullmatch(key) and not key.endswith(".path") else path
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Mapping):
        return {
            str(name): _plain(inner, join_key(key, str(name)), objects=objects, problems=problems)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [
            _plain(inner, join_key(key, number), objects=objects, problems=problems)
            for number, inner in enumerate(value)
        ]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, numbers.Number) and not isinstance(value, bool | int | float) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, str) and (fault := invalid_characters(value)) is not None:
        problems.append(Problem(key, fault))
    elif not isinstance(value, str | bool | int | float | None):
        problems.append(Problem(key, f"an object of type `{type(value).__name__}` cannot stand here. {_advice(key)}"))
    return value


def is_object(key: str, value: Any) -> bool:
    """Return whether the value at the dotted key is rows, a model or a tokenizer rather than a value of YAML."""
    if isinstance(value, str | bytes | os.PathLike | Section | None):
        return False
    if _PRETRAINED.fullmatch(key):
        return hasattr(value, "save_pretrained")
    if not _ROWS.fullmatch(key) or (isinstance(value, Mapping) and not hasattr(value, "num_rows")):
        return False
    return isinstance(value, Iterable) or callable(value)


def _advice(key: str) -> str:
    if _ROWS.fullmatch(key):
        return "Rows are a `datasets.Dataset`, an iterable of dicts or a function that returns one."
    if _PRETRAINED.fullmatch(key):
        return "Write a name or a path, or an object with `save_pretrained`."
    return "Write text, a number, true or false, a list or a section."
