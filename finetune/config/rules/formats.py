"""Rules of what a source's columns mean: formats that fit the task, columns and templates that the format knows."""

from collections.abc import Iterator, Mapping
from typing import Any

from finetune.config.rules.sources import sources
from finetune.config.rules.tasks import FITTING
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, Format
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem
from finetune.runtime.lazy import lazily

with lazily():
    from jinja2 import environment, exceptions

COLUMNS: Mapping[Format, tuple[str, ...]] = {
    form: columns + OPTIONAL_COLUMNS.get(form, ()) for form, columns in REQUIRED_COLUMNS.items()
}
"""The columns that each format can be told the user's names of."""

_OF_TURNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""The columns of which a template may write turn for turn."""

_INSTEAD: Mapping[Format, str] = {
    "preference": "To learn from the answer that was chosen: `prompt_completion`, `columns: {completion: chosen}`",
    "labelled": "To learn to write the label: `prompt_completion`, `template: {prompt: '{{ text }}', completion: "
    "'{{ label }}'}`",
}


def format_fits_task(config: RunConfig) -> Iterator[Problem]:
    """Each task reads the formats that it can learn from."""
    task = config.task.name
    fitting = FITTING[task]
    for key, source in sources(config):
        form = source.format
        if form is None or form in fitting:
            continue
        others = [name for name, formats in FITTING.items() if form in formats]
        what = "`text` has no turns for" if form == "text" else f"`{form}` does not fit"
        instead = [f"Write {listed(fitting, last='or')}", *(f"`task.name: {name}`" for name in others)]
        hint = _INSTEAD.get(form) if task == "sft" else None
        yield Problem(f"{key}.format", f"{what} `task.name: {task}`. {hint or ', or '.join(instead)}.")


def columns_are_known(config: RunConfig) -> Iterator[Problem]:
    """`columns` and `template` lead from names that the format knows, or that some format knows where none is set."""
    for key, source in sources(config):
        known = [name for form, names in COLUMNS.items() if source.format in (None, form) for name in names]
        for where, columns in (("columns", source.columns), ("template", source.template)):
            for column, yours in columns.items():
                if column not in known:
                    who = f"format `{source.format}`" if source.format else "any format"
                    hint = did_you_mean(column, known) or f"It has {listed(dict.fromkeys(known))}."
                    if where == "columns" and yours in known:
                        hint = f"The format's name comes first: `{yours}: {column}`."
                    yield Problem(f"{key}.{where}.{column}", f"there is no column `{column}` in {who}. {hint}")


def templates_can_be_read(config: RunConfig) -> Iterator[Problem]:
    """A row template is Jinja for a text, or a list of turns of such texts; its column is not mapped besides."""
    for key, source in sources(config):
        for column, written in source.template.items():
            place = f"{key}.template.{column}"
            if column in source.columns:
                yield Problem(place, f"the column is in `{key}.columns.{column}` already. Write only one of them.")
            yield from _template_faults(written, place, column=column)


def _template_faults(written: Any, place: str, *, column: str) -> Iterator[Problem]:
    if isinstance(written, str):
        yield from _syntax_faults(written, place)
    elif column not in _OF_TURNS:
        yield Problem(place, "a template of this column is one text.")
    elif not isinstance(written, list) or not all(isinstance(turn, dict) for turn in written):
        yield Problem(
            place, "a template of turns is a list of `{role: ..., content: ...}`, or one text that gives JSON."
        )
    else:
        texts = ((number, name, text) for number, turn in enumerate(written) for name, text in turn.items())
        for number, name, text in texts:
            if isinstance(text, str):
                yield from _syntax_faults(text, f"{place}.{number}.{name}")


def _syntax_faults(text: str, place: str) -> Iterator[Problem]:
    try:
        environment.Environment(autoescape=True).parse(text)
    except exceptions.TemplateSyntaxError as error:
        yield Problem(place, f"not valid Jinja in line {error.lineno} of the text: {error.message}")


FORMAT_RULES = (format_fits_task, columns_are_known, templates_can_be_read)
