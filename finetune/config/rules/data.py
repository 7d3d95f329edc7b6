"""Rules of `data:` - one place per source, formats that fit the task, columns that the format knows."""

from collections.abc import Iterator, Mapping

from finetune.config.paths import is_path
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import OPTIONAL_COLUMNS, REQUIRED_COLUMNS, Format, SourceSection
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem

COLUMNS: Mapping[Format, tuple[str, ...]] = {
    form: columns + OPTIONAL_COLUMNS.get(form, ()) for form, columns in REQUIRED_COLUMNS.items()
}
"""The columns that each format can be told the user's names of."""

TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "qwen", "zephyr")
"""Chat templates that come with the package."""


def sources(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Yield each source with its dotted key."""
    mix = config.data.train.mix
    yield from ((f"data.train.mix.{number}", source) for number, source in enumerate(mix))
    if not mix:
        yield "data.train", config.data.train
    if config.data.validation is not None:
        yield "data.validation", config.data.validation


def source_is_one(config: RunConfig) -> Iterator[Problem]:
    """Rows come from exactly one place."""
    for key, source in sources(config):
        if source.path is not None and source.name is not None:
            yield Problem(f"{key}.name", f"the rows are in `{key}.path` already. Write only one of them.")
        if source.path is None and source.name is None:
            yield Problem(key, "there are no rows. Write `path` (a local file) or `name` (a hub dataset).")


def format_fits_task(config: RunConfig) -> Iterator[Problem]:
    """`pretrain` reads text, `sft` reads conversations."""
    task = config.task.name
    for key, source in sources(config):
        if source.format is None:
            continue
        if task == "pretrain" and source.format != "text":
            message = f"`{source.format}` does not fit `task.name: pretrain`, which reads `text`."
            yield Problem(f"{key}.format", f"{message} Write `text`, or `task.name: sft`.")
        if task == "sft" and source.format == "text":
            others = listed([name for name in COLUMNS if name != "text"], last="or")
            message = f"`text` has no turns for `task.name: sft`. Write {others}, or `task.name: pretrain`."
            yield Problem(f"{key}.format", message)


def columns_are_known(config: RunConfig) -> Iterator[Problem]:
    """`columns` maps from names that the format knows; without a format, from names that some format knows."""
    for key, source in sources(config):
        known = [name for form, names in COLUMNS.items() if source.format in (None, form) for name in names]
        for column, yours in source.columns.items():
            if column in known:
                continue
            who = f"format `{source.format}`" if source.format else "any format"
            hint = did_you_mean(column, known) or f"It has {listed(known)}."
            if yours in known:
                hint = f"The format's name comes first: `{yours}: {column}`."
            yield Problem(f"{key}.columns.{column}", f"there is no column `{column}` in {who}. {hint}")


def template_is_known(config: RunConfig) -> Iterator[Problem]:
    """A chat template is one of ours or a file."""
    template = config.data.chat_template
    if template is not None and template not in TEMPLATES and not is_path(template):
        hint = did_you_mean(template, TEMPLATES) or f"Write {listed(TEMPLATES)}."
        message = f"there is no template `{template}`. {hint} A file begins with `.`, `/` or `~`: `./{template}`."
        yield Problem("data.chat_template", message)


DATA_RULES = (source_is_one, format_fits_task, columns_are_known, template_is_known)
