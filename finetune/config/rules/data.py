"""Rules of `data:` other than its sources: formats, columns, templates, images, batching and mixes."""

from collections.abc import Iterator
from typing import Any

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.paths import is_path
from finetune.config.rules.model import adapter_of
from finetune.config.rules.sources import row_sources, source_sections
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import TrainedSourceSection
from finetune.errors import Problem
from finetune.registry.formats import FORMATS, TEMPLATES
from finetune.registry.tasks import TASKS, tasks_where
from finetune.runtime.optional import lazily

with lazily():
    from jinja2 import environment, exceptions

BUILT_IN_TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "plain", "qwen", "zephyr")
"""Chat templates that come with the package."""

RESERVED_TEMPLATE_ARGUMENTS = ("messages", "conversations", "tools", "add_generation_prompt", "continue_final_message")
"""Arguments that every chat template receives from the row."""


def chat_template_is_usable(config: RunConfig) -> Iterator[Problem]:
    """A chat template is built in or a file, with arguments of its own; only some tasks choose among turns."""
    for name in config.data.chat_template_arguments or {}:
        if name in RESERVED_TEMPLATE_ARGUMENTS:
            instead = "Rows have a column `tools`." if name == "tools" else "Remove it."
            message = f"the template receives it from the row, so it cannot be an argument. {instead}"
            yield Problem(f"data.chat_template_arguments.{name}", message)
    template = config.data.chat_template
    known = (*BUILT_IN_TEMPLATES, *TEMPLATES.choices)
    if template is not None and template not in known and not is_path(template):
        hint = did_you_mean(template, known) or f"Write {format_list(known, last='or')}."
        message = (
            f"the template `{template}` does not exist. {hint} For a file, begin with `.`, `/` or `~`: `./{template}`."
        )
        yield Problem("data.chat_template", message)
    key, data = "data.train_on_reasoning", config.data
    if data.train_on_reasoning:
        return
    if not TASKS[config.task.name].chooses_turns:
        names = format_list(tasks_where("chooses_turns"))
        yield Problem(key, f"only {names} choose their targets among turns. Remove it.")
    elif data.train_on == "all":
        yield Problem(key, "with `data.train_on: all` every token is a target. Write `train_on: assistant`.")


_CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""The columns whose template may be a list of turns."""


def format_fits_task(config: RunConfig) -> Iterator[Problem]:
    """Each task reads the formats that fit it."""
    task = config.task.name
    fitting = TASKS[task].formats
    for key, source in row_sources(config):
        form = source.format
        if form is None or form in fitting or FORMATS[form].like in fitting:
            continue
        others = [entry.name for entry in TASKS if form in entry.formats]
        what = "`text` has no turns for" if form == "text" else f"`{form}` does not fit"
        instead = [f"Write {format_list(fitting, last='or')}", *(f"`task.name: {name}`" for name in others)]
        yield Problem(f"{key}.format", f"{what} `task.name: {task}`. {', or '.join(instead)}.")


def columns_are_known(config: RunConfig) -> Iterator[Problem]:
    """`columns` and `template` map from columns of the format, or of any format where none is set."""
    for key, source in row_sources(config):
        forms = [form for form in FORMATS if source.format in (None, form.name)]
        known = [column for form in forms for column in form.columns]
        for where, columns in (("columns", source.columns), ("template", source.template)):
            for column, yours in columns.items():
                is_position = where == "columns" and column.isdecimal()
                if column not in known and not is_position:
                    who = f"format `{source.format}`" if source.format else "any format"
                    hint = did_you_mean(column, known) or f"It has {format_list(dict.fromkeys(known))}."
                    if where == "columns" and yours in known:
                        hint = f"The format's name goes first: `{yours}: {column}`."
                    yield Problem(f"{key}.{where}.{column}", f"the column `{column}` does not exist in {who}. {hint}")
                elif isinstance(yours, tuple) and column not in [form.joined for form in forms]:
                    message = f"`[{', '.join(map(str, yours))}]` is a list. To join columns, write a `template`."
                    yield Problem(f"{key}.columns.{column}", message)


def templates_can_be_read(config: RunConfig) -> Iterator[Problem]:
    """A row template is a Jinja text or a list of turns of such texts; its column is not also in `columns`."""
    for key, source in row_sources(config):
        for column, written in source.template.items():
            template_key = f"{key}.template.{column}"
            if column in source.columns:
                message = f"the column is already mapped by `{key}.columns.{column}`. Keep only one of them."
                yield Problem(template_key, message)
            yield from _template_problems(template_key, written, column=column)


def _template_problems(key: str, written: Any, *, column: str) -> Iterator[Problem]:
    if isinstance(written, str):
        yield from _syntax_problems(key, written)
    elif column not in _CHAT_COLUMNS:
        yield Problem(key, "the template of this column must be one text. Write a text instead of a list.")
    elif not isinstance(written, list) or not all(isinstance(turn, dict) for turn in written):
        message = "a template of turns must be a list of `{role: ..., content: ...}`, or one text that renders to JSON."
        yield Problem(key, message)
    else:
        texts = ((number, name, text) for number, turn in enumerate(written) for name, text in turn.items())
        for number, name, text in texts:
            if isinstance(text, str):
                yield from _syntax_problems(f"{key}.{number}.{name}", text)


def _syntax_problems(key: str, text: str) -> Iterator[Problem]:
    try:
        environment.Environment(autoescape=True).parse(text)
    except exceptions.TemplateSyntaxError as error:
        yield Problem(key, f"not valid Jinja in line {error.lineno} of the text: {error.message}")


def images_fit(config: RunConfig) -> Iterator[Problem]:
    """Ranges ascend, and mixup and CutMix have random access to other images, which a stream does not have."""
    images = config.data.images
    if images.crop_scale and images.crop_scale[0] > images.crop_scale[1]:
        low, high = sorted(images.crop_scale)
        yield Problem("data.images.crop_scale", f"the range is descending. Write `[{low}, {high}]`.")
    if images.min_pixels and images.max_pixels and images.min_pixels > images.max_pixels:
        yield Problem("data.images.min_pixels", "it is greater than `data.images.max_pixels`. Swap them.")
    images = config.data.images
    for key, source in source_sections(config):
        if isinstance(source, TrainedSourceSection) and source.stream is not None:
            for name in ("mixup", "cutmix"):
                if getattr(images, name) > 0:
                    message = f"it needs random access to other images, but `{key}` is a stream. Remove one of the two."
                    yield Problem(f"data.images.{name}", message)


def microbatch_holds_whole_batch_norm_groups(config: RunConfig) -> Iterator[Problem]:
    """Each microbatch holds whole groups of batch norms; with adapters, batch norms are frozen."""
    size = config.model.batch_norm
    if not isinstance(size, int):
        return
    if adapter_of(config) is not None:
        message = "with adapters the base is frozen, including its running statistics. Write `frozen`."
        yield Problem("model.batch_norm", message)
        return
    micro, holder = config.train.microbatch_size, "microbatch"
    if micro == "auto":
        micro, holder = config.train.global_batch_size, "global batch"
    if micro % size:
        message = f"a {holder} of {micro} is not a multiple of {size}. Write a number that divides {micro}."
        yield Problem("model.batch_norm", message)


MAX_WINDOW = 100_000_000
"""Number of samples that can be sorted by length together."""

MIX_MEASURES = ("weight", "rows", "epochs")
"""Ways to give the amount of a source in a mix."""


def mix_is_consistent(config: RunConfig) -> Iterator[Problem]:
    """All sources of a mix give their amount by the same key; `rows` needs positions of one row each."""
    first = None
    for number, source in enumerate(config.data.train.mix):
        key = f"data.train.mix.{number}"
        written = [name for name in MIX_MEASURES if getattr(source, name) is not None]
        first = first or (written[0] if written else None)
        if not written:
            message = f"the amount in the mix is missing. Write one of {format_list(MIX_MEASURES, last='or')}."
            yield Problem(key, message)
        for name in written:
            if name != first:
                message = f"the other sources of `data.train.mix` use `{first}`. Use the same key in every source."
                yield Problem(f"{key}.{name}", message)
        if source.rows is not None and (by := config.data.batching.by) != "samples":
            message = f"with `data.batching.by: {by}` one position holds several rows. Use `epochs` or `weight`."
            yield Problem(f"{key}.rows", message)


def batches_hold_samples(config: RunConfig) -> Iterator[Problem]:
    """A pack or batch holds the longest sample, and a microbatch one batch by tokens; a window is sorted in memory."""
    steps, batch = config.data.batching.num_sorted_steps, config.train.global_batch_size
    if steps > 1 and steps * batch > MAX_WINDOW:
        most = max(1, MAX_WINDOW // batch)
        message = f"{steps:,} steps of {batch:,} samples are too many to sort at once. Write at most {most:,}."
        yield Problem("data.batching.length_window_steps", message)
    tokens, longest = config.data.batching.tokens, config.data.max_length
    if tokens is not None and longest is not None and tokens < longest:
        message = f"a sample of `data.max_length` ({longest}) tokens does not fit. Write at least {longest}."
        yield Problem("data.batching.tokens", message)
    if config.data.batching.by != "tokens":
        return
    evaluated = config.evaluate.microbatch_size if config.evaluate else None
    for section, size in (("train", config.train.microbatch_size), ("evaluate", evaluated)):
        if size not in (None, 1):
            message = "with `data.batching.by: tokens` one position is a whole batch. Write 1."
            yield Problem(f"{section}.microbatch_size", message)
    if TASKS[config.task.name].sample == "source_and_target" and longest is not None:
        both = longest + (config.task.seq2seq.max_target_length or longest)
        if (tokens or 0) < both:
            message = f"the longest source and the longest target have {both} tokens. Write at least that many."
            yield Problem("data.batching.tokens", message)


RULES = (
    format_fits_task,
    columns_are_known,
    templates_can_be_read,
    chat_template_is_usable,
    batches_hold_samples,
    mix_is_consistent,
    images_fit,
    microbatch_holds_whole_batch_norm_groups,
)
