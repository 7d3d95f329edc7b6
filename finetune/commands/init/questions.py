"""`finetune init` on a terminal: a job by five questions, with the settings of the recipe of that task."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands import check
from finetune.commands.init.init import (
    JOB_FILE,
    PRETRAINED_QUICKSTART,
    format_written,
    launch_files,
    launch_line,
    recipes,
    write_checked,
)
from finetune.commands.preview.file import FileContents, look_into
from finetune.commands.printing import print_facts
from finetune.config.paths import is_path, is_url
from finetune.config.yaml import read_yaml
from finetune.data.formats.layouts import describe_unused, layout_hint
from finetune.data.sources.slices import Split
from finetune.errors import FinetuneError, UserError
from finetune.migration.complete import locate
from finetune.migration.draft import yaml_value
from finetune.recipes import FOLDER
from finetune.registry.formats import FORMATS
from finetune.registry.tasks import TASKS

_LORA = {"rank": 16, "alpha": 32.0, "target_modules": "all-linear"}
_LORA_RATE = 10.0
"""Learning rate of adapters divided by that of full fine-tuning, about."""

_DATA_SETTINGS = ("max_length", "over_length", "truncate_side", "images")
"""Settings of a recipe's `data` that do not depend on its rows."""

_SHOWN_ROWS = 2


@dataclass(frozen=True)
class InitAnswers:
    """The answers so far, from flags or the terminal; None: not answered yet."""

    task: str | None = None
    data: str | None = None
    model: str | None = None
    gpus: int | None = None
    lora: bool | None = None


def is_asked(answers: InitAnswers) -> bool:
    """Return whether a job is made by answers: one is given, or there is a terminal to ask on."""
    return answers != InitAnswers() or sys.stdin.isatty()


def init_by_answers(answers: InitAnswers, into: Path | None, *, strategy: str | None = None) -> None:
    """Write a job and check it; questions without a flag are asked on a terminal.

    With a strategy, or on several GPUs, an accelerate file is written next to it, which the command at the end names.
    Raises UserError for an answer that is not possible, and without a terminal for one that is missing.
    """
    if sys.stdin.isatty():
        print(f"A job by five questions. For a recipe, write its name instead: finetune init {' | '.join(recipes())}")
    task = _answer(answers.task, "task", _task, question="What is trained (task)", default="sft")
    data = _answer(answers.data, "data", lambda path: _rows(path, task), question="File or folder with the rows (data)")
    recipe = _recipe(task, has_lora=answers.lora)
    usual = recipe["model"].get("name")
    model = _answer(answers.model, "model", _model, question="Model: hub name or folder", default=usual)
    usual_gpus = "1" if strategy in (None, "single") else "2"
    gpus = _answer(answers.gpus, "gpus", _gpus, question="GPUs (0: the CPU)", default=usual_gpus)
    may_adapt = TASKS[task].head != "image_classification"
    lora = bool(answers.lora)
    if answers.lora is None and may_adapt and sys.stdin.isatty():
        lora = _answer(None, "lora", _lora, question="LoRA adapters or all weights (lora/full)", default="lora")
    recipe = _recipe(task, has_lora=lora)
    folder = into or Path(task)
    if strategy is None and gpus > 1:
        strategy = "ddp" if lora else "fsdp2"
    num_processes, cadence = max(1, gpus), _cadence(data, global_batch_size=_BATCH_PER_GPU * max(1, gpus))
    job = _job(recipe, {"name": model}, data, cadence, gpus=gpus, has_lora=lora)
    launch = launch_files(strategy, folder, num_processes=num_processes)
    for written in format_written(write_checked(folder, {JOB_FILE: job, **launch}, num_processes=num_processes)):
        print(f"wrote {written}")
    check.check(folder / JOB_FILE, [], num_processes=num_processes)
    print(cadence.sentence)
    print(f"start with: {launch_line(folder, strategy, num_processes=num_processes)}")


_BATCH_PER_GPU = 16
_EVALUATED = 0.05
_USUAL_CADENCE, _USUAL_LOG, _MAX_CADENCE = 100, 10, 1000


@dataclass(frozen=True)
class _Cadence:
    """How often a job evaluates, saves and logs, in steps, and a sentence about its number of steps."""

    every_steps: int
    log_every_steps: int
    warmup_fraction: float
    can_validate: bool  # there are enough rows for a split
    sentence: str


def _cadence(rows: FileContents, *, global_batch_size: int) -> _Cadence:
    """Return the cadence of one epoch: about ten evaluations; usual numbers where rows at a URL are not counted."""
    if rows.source is None or is_url(str(rows.keys["path"])) or not (num_rows := rows.source.num_rows()):
        sentence = f"The rows at a URL were not counted: it evaluates and saves every {_USUAL_CADENCE} steps."
        return _Cadence(_USUAL_CADENCE, _USUAL_LOG, 0.03, True, sentence)
    num_held_out = Split(_EVALUATED, seed=0).num_held_out(num_rows)
    num_steps = math.ceil((num_rows - num_held_out) / global_batch_size)
    tenth = max(1, num_steps // 10)
    every = min(_MAX_CADENCE, int(f"{str(tenth)[0]}{'0' * (len(str(tenth)) - 1)}"))  # one digit, then zeros
    steps = f"{num_steps:,} step{'s' * (num_steps != 1)} of {global_batch_size} rows"
    sentence = (
        f"It takes {steps}: {num_rows - num_held_out:,} of {num_rows:,} rows once, fewer where some are dropped; "
        f"it evaluates and saves every {f'{every:,} steps' if every > 1 else 'step'}."
    )
    warmup_fraction = 0.03 if num_steps >= 100 else 0.1  # of few steps, a few
    return _Cadence(every, min(_USUAL_LOG, every), warmup_fraction, num_held_out > 0, sentence)


def _answer(given: Any, flag: str, read: Callable[[Any], Any], *, question: str, default: str | None = None) -> Any:
    """Return the flag's value, else ask until the answer is valid; without a terminal, use the default."""
    if given is not None:
        try:
            return read(given)
        except FinetuneError as error:
            raise UserError(f"--{flag} {given}: {error}") from error
    while sys.stdin.isatty():
        written = input(f"{question}{'' if default is None else f' [{default}]'}: ").strip() or default
        try:
            if written is not None:
                return read(written)
        except FinetuneError as error:
            print(f"  {error}")
    if default is None or flag == "task":
        raise UserError(f"--{flag}: it is missing, and without a terminal it cannot be asked for.")
    return read(default)


def _task(name: str) -> str:
    return TASKS[name].name  # raises RegistryError with the names


def _rows(path: str, task: str) -> FileContents:
    """Return the contents of the files; raises UserError where no format of the task can read the rows."""
    contents = look_into(path, num_rows=_SHOWN_ROWS, task=task)
    if contents.error is not None:
        raise contents.error
    if contents.source is None:
        columns = ", ".join(str(name) for name in contents.rows[0])
        formats = "; ".join(f"{name} ({', '.join(FORMATS[name].required)})" for name in TASKS[task].formats)
        raise UserError(
            f"the columns {columns} fit none of the formats of `{task}`: {formats}. {layout_hint(contents.rows)}"
        )
    if contents.layout is not None:
        print_facts([("not read", line) for line in describe_unused(contents.layout)])
    return contents


def _model(written: str) -> str:
    """Return a hub name, or the absolute path of a folder; raises UserError where that is not one of a model."""
    name = locate(written, Path.cwd())
    with suppress(RuntimeError):  # there is no such home folder
        if not is_path(name) or (Path(name).expanduser() / "config.json").is_file():
            return name
    raise UserError(f"{name} is not a folder with a model and its config.json.")


def _gpus(written: str | int) -> int:
    if not str(written).isdecimal() or int(written) > 1024:
        raise UserError("write a whole number, such as 1.")
    return int(written)


def _lora(written: str) -> bool:
    if written.lower() not in ("lora", "full"):
        raise UserError("write lora or full.")
    return written.lower() == "lora"


def _recipe(task: str, *, has_lora: bool | None) -> dict[str, Any]:
    """Return the values of a recipe of the task: best, one with adapters where there will be some."""
    found: list[dict[str, Any]] = []
    for path in sorted(FOLDER.glob("*.yaml")):
        if path.stem == PRETRAINED_QUICKSTART:  # its settings are for a few minutes
            continue
        values = read_yaml(path.read_text(encoding="utf-8")).values
        if values["task"]["name"] == task and "quantization" not in values["model"]:
            found.append(values)
    named = [values for values in found if "name" in values["model"]] or found
    return next((values for values in named if ("lora" in values["model"]) is bool(has_lora)), named[0])


def _job(
    recipe: dict[str, Any],
    model: dict[str, Any],
    rows: FileContents,
    cadence: _Cadence,
    *,
    gpus: int,
    has_lora: bool,
) -> str:
    """Return the job's text: the recipe's settings with these rows and this model."""
    had_lora = "lora" in recipe["model"]
    rate = recipe["train"]["learning_rate"]
    rate = rate if had_lora == has_lora else rate * _LORA_RATE if has_lora else rate / _LORA_RATE
    if has_lora:
        model |= {"dtype": "bfloat16"} if gpus else {}
        model["lora"] = recipe["model"].get("lora", _LORA)
    is_image = TASKS[recipe["task"]["name"]].reads == "images"
    settings = {key: value for key, value in recipe["data"].items() if key in _DATA_SETTINGS}
    tokens = {} if is_image else {"over_length": "truncate" if TASKS[recipe["task"]["name"]].classifies else "drop"}
    task = dict(recipe["task"])
    if "classification" in task:
        task["classification"] = {key: value for key, value in task["classification"].items() if key != "labels"}
    reading = rows.readings[0]
    if reading.options and (section := TASKS[task["name"]].section):
        task[section] = {**task.get(section, {}), **reading.options}
        if "kind" in reading.options:  # of several labels or a number
            task.pop("label_smoothing", None)
    validation = {"validation": {"fraction": _EVALUATED}} if cadence.can_validate else {}
    data = {"train": {**rows.keys, **reading.source}, **validation, **tokens, **settings}
    sections = {
        "run": {"folder": f"runs/{recipe['task']['name']}"},
        "model": model,
        "data": {**data, **reading.data},
        "task": {key: value for key, value in task.items() if value != {}},
        "train": {
            "global_batch_size": _BATCH_PER_GPU * max(1, gpus),
            "microbatch_size": 4,
            "epochs": 1,
            "learning_rate": float(f"{rate:.3g}"),
            "schedule": {"name": "cosine", "warmup_fraction": cadence.warmup_fraction},
            **({"precision": "bf16"} if gpus else {}),
        },
        **({"evaluate": {"every_steps": cadence.every_steps}} if cadence.can_validate else {}),
        "checkpoint": {"every_steps": cadence.every_steps},
        "report": {"log_every_steps": cadence.log_every_steps},
    }
    title = "# Made by `finetune init`, with the settings of a recipe. Every key: docs/reference/job/.\n"
    return title + "".join(_section(name, values, "") for name, values in sections.items())


def _section(name: str, values: Any, indent: str) -> str:
    if not isinstance(values, dict) or name in ("columns", "template") or not values:
        return f"{indent}{name}: {yaml_value(values)}\n"
    inner = "".join(_section(key, value, f"{indent}  ") for key, value in values.items())
    return f"{'' if indent else chr(10)}{indent}{name}:\n{inner}"
