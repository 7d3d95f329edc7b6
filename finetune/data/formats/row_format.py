"""Formats: the meaning of a row's columns. They return `messages`, `text`, a preference pair or labelled data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, cast

from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import NOTES, PREVIEW, ColumnNames, Columns, quoted_list
from finetune.data.formats.conversations import attach_images, read_exchange, turns_of, with_system
from finetune.data.formats.layouts import is_empty, layout_hint, meaning_of, unread_meanings
from finetune.data.images import ImageRoot
from finetune.data.rows import (
    ARGUMENTS,
    FAULTS_OF_VALUES,
    RawRow,
    Row,
    describe,
    read_template_arguments,
    read_tools,
)
from finetune.data.templates.row_template import WHOLE_ROW, check_row_template, columns_used
from finetune.data.turns import read_turns, turn_keys
from finetune.errors import DataError
from finetune.registry.formats import FORMATS
from finetune.registry.plugins import code_identity
from finetune.registry.turns import ROLES


def read_labelled(columns: Columns) -> Row:
    """Return `text`, optionally `text_pair`, and `label`: a label or number, a list of these, or 0 or 1 by class."""
    label = columns.labels("label")
    values = label.values() if isinstance(label, dict) else label if isinstance(label, list) else [label]
    if not all(value is None or isinstance(value, str | int | float) for value in values):
        hint = ""
        if isinstance(label, list) and all(isinstance(value, list | dict) for value in label):
            hint = f" Write `format: spans` with `columns: {{spans: {columns.names.columns.get('label', 'label')}}}`."
        raise DataError(
            f"{columns.title('label')} must be text, a number or a boolean, or a list of texts or numbers, but is "
            f"{describe(label)}.{hint}"
        )
    row = {"text": columns.text("text"), "label": label}
    return row if columns.optional("text_pair") is None else {**row, "text_pair": columns.text("text_pair")}


def read_tagged(columns: Columns) -> Row:
    """Return the words and the tag of each."""
    words, tags = read_tokens(columns), columns.labels("tags")
    if not isinstance(tags, list) or not all(tag is None or isinstance(tag, str | int) for tag in tags):
        raise DataError(f"{columns.title('tags')} must be a list of texts or numbers, but is {describe(tags)}.")
    if len(words) != len(tags):
        raise DataError(
            f"{columns.title('tokens')} has {len(words)} words and {columns.title('tags')} {len(tags)} tags. "
            "Each word needs one tag."
        )
    return {"tokens": words, "tags": tags}


def read_tokens(columns: Columns) -> list[str]:
    """Return the words of a row that is split into words."""
    words = columns.value("tokens")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{columns.title('tokens')} must be a list of texts, but is {describe(words)}.")
    return words


_MAX_NAMES = 8


class RowFormat:
    """The format of rows that have already been read by another format, and base of the others."""

    def read(self, raw: RawRow) -> Row:
        """Return the row with the format's columns; raises DataError naming the row and the column."""
        return raw.parse()

    def identity(self) -> Any:
        """Return the settings of the format as JSON values, for fingerprints; None without settings."""
        return None


ALREADY_READ = RowFormat()


@dataclass(frozen=True)
class ColumnFormat(RowFormat):
    """A format with its mapping to the user's columns."""

    names: ColumnNames

    @cached_property
    def _read(self) -> Callable[[Columns], Row]:
        return cast(Callable[[Columns], Row], FORMATS.resolve(self.names.format))

    def read(self, raw: RawRow) -> Row:
        """Return `messages` (with `tools` if the row has any), `text`, `text` and `label`, or a preference pair.

        Raises DataError naming the row and the column.
        """
        row = raw.parse()
        try:
            columns = Columns(self.names, row, origin=raw.origin)
            read = self._read(columns)
            if not isinstance(read, Mapping):
                like = FORMATS[self.names.format].like
                raise FORMATS.refusal(self.names.format, read, f"a row as the format `{like}` returns it, a dictionary")
            notes = (*read.get(NOTES, ()), *columns.lacking(), *self._unread_note(row))
            return {**read, NOTES: notes} if notes else read
        except (DataError, *FAULTS_OF_VALUES) as error:
            raise DataError(f"{raw.location}: {error}") from error

    def _unread_note(self, row: Row) -> tuple[str, ...]:
        """Return the note on a row that has a value in a column that changes its meaning and is not read."""
        return (UNREAD,) if any(not is_empty(row.get(column)) for column in self.names.unread) else ()

    def identity(self) -> Any:
        """Return the names of the format and of its columns, and the templates."""
        names, code = self.names, code_identity(FORMATS[self.names.format])
        mappings = [dict(sorted(mapping.items())) for mapping in (names.columns, names.template)]
        parts: list[Any] = [names.format, *code, *mappings]
        if names.joined:
            parts.append({column: list(yours) for column, yours in names.joined.items()})
        if names.image_root is not None and names.image_root.counts_from is not None:
            parts.append(str(names.image_root.counts_from))
        if names.has_arguments:
            parts.append(ARGUMENTS)
        if roles := [[entry.name, entry.role, entry.is_call] for entry in ROLES if entry.plugin]:
            parts.append(roles)
        if names.classes:
            parts.append({column: list(class_names) for column, class_names in names.classes.items()})
        return parts


UNREAD = "a column that changes the meaning of the row is not read"
"""The note on a row that has a value in such a column."""


def choose_format(
    section: SourceSection,
    first: RawRow,
    *,
    key: str,
    log: Callable[[str], None],
    rows: Sequence[Row] = (),
    class_names: Callable[[], Mapping[str, Sequence[str]]] = dict,
    image_root: ImageRoot | None = None,
) -> ColumnFormat:
    """Return the configured format, or the one detected from the columns of the first row; log it and unread columns.

    `rows` are the first rows, which tell what unread columns mean. `image_root` has the folders of image files.
    `class_names` returns the dataset's names for integer labels, which replace them. Raises DataError if no format
    fits, if `columns` or `template` has a column that the format does not have, or if a template is not valid Jinja.
    """
    for column, written in section.template.items():
        check_row_template(written, key=f"{key}.template.{column}")
    row = first.parse()
    rows = rows or [row]
    name = section.format or _detect(section, first, rows, key=key)
    expected = FORMATS[name].columns
    by_template = {name for written in section.template.values() for name in columns_used(written)}
    by_name = {section.column_names.get(column, column) for column in expected if column not in section.template}
    by_name |= {column for yours in section.joined_columns.values() for column in yours}
    is_whole_read = WHOLE_ROW in by_template
    used = by_template | by_name
    if section.format is None:
        read = [column for column in _available(section, row) if is_whole_read or {column} & {*used, *section.template}]
        log(f"{key}.format is not set: the columns {quoted_list(read)} are read as `{name}`")
    _require_columns_of_format(section, name, key=key)
    others = [] if is_whole_read else [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in used]
    unread = _log_unread(others, rows, form=name, key=key, log=log)
    for column in sorted(by_name & row.keys()):
        keys = turn_keys(row[column])
        if keys and keys not in (("role", "content"), ("from", "value")):
            log(f"{key}: the turns of `{column}` are read from their keys {quoted_list(keys)}")
    classes: dict[str, Sequence[str]] = {}  # names of integer labels, unless the labels come from a template
    label = FORMATS[name].classes
    yours = section.column_names.get(label or "", label or "")
    if label is not None and label not in section.template and (names := class_names().get(yours)):
        classes[label] = names
        listed = quoted_list(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")
        log(f"{key}: the numbers of `{yours}` have names in the dataset, which are the classes: {listed}")
    column_names = ColumnNames(
        format=name,
        columns=section.column_names,
        template=dict(section.template),
        key=key,
        joined=section.joined_columns,
        classes=classes,
        image_root=image_root,
        has_arguments=ARGUMENTS in expected and ARGUMENTS in row,
        unread=unread,
    )
    return ColumnFormat(column_names)


def _require_columns_of_format(section: SourceSection, form: str, *, key: str) -> None:
    """Raise DataError for a column in `columns` or `template` that the format does not have."""
    expected = FORMATS[form].columns
    for field, columns in (("columns", section.mapped), ("template", section.template)):
        for column in columns:
            if column not in expected:
                raise DataError(
                    f"{key}.{field}: format `{form}` has no column `{column}`; it has {quoted_list(expected)}. "
                    "Write the format's name first, then yours: {completion: answer}."
                )


def _log_unread(
    columns: Sequence[str], rows: Sequence[Row], *, form: str, key: str, log: Callable[[str], None]
) -> tuple[str, ...]:
    """Log the columns that are not read, and return the columns that change what a row of this format means.

    These count in rows that have a value there, even if none of the first rows has.
    """
    if not columns:
        return ()
    log(f"{key}: unused columns: {quoted_list(columns)}")
    meanings = unread_meanings(columns, rows, form=form)
    for column, meaning in meanings.items():
        log(f"warning: {key}: `{column}` {meaning.says}, and is not read: {meaning.remedy_of(column)}.")
    if hint := layout_hint(rows, form=form, has_meanings=bool(meanings)):
        log(f"warning: {key}: {hint}")
    return tuple(column for column in columns if (known := meaning_of(column)) and form in known.formats)


def _detect(section: SourceSection, first: RawRow, rows: Sequence[Row], *, key: str) -> str:
    available = _available(section, first.parse())
    for form in (form for form in FORMATS if not form.plugin):  # a plugin's is only read if it is named
        names = [section.mapped.get(column, (column,)) for column in form.required]
        has_required = all(name in available for yours in names for name in yours)
        if has_required and all(column in form.columns for column in (*section.mapped, *section.template)):
            return form.name
    listed = quoted_list(available)
    hint = layout_hint(rows)
    if not hint:
        choices = "; ".join(f"{form.name}: {quoted_list(form.required)}" for form in FORMATS)
        hint = (
            f"Set {key}.format and map its columns with {key}.columns (for example {{prompt: question, completion: "
            f"answer}}), or write a {key}.template. Formats are {choices}. {PREVIEW}"
        )
    raise DataError(f"{first.location}: cannot tell the format from its columns {listed}. {hint}")


def _available(section: SourceSection, row: Row) -> tuple[str, ...]:
    """Return the columns available to a format: from templates, then the row's."""
    return tuple(dict.fromkeys((*section.template, *row)))


def read_conversation(columns: Columns) -> Row:
    """Return the turns of the column `messages`, or `conversations`, after the row's `system` text."""
    (name,) = FORMATS[columns.names.format].required
    turns = read_turns(columns.json_value(name), title=columns.title(name), with_images=True)
    return with_tools(attach_images({"messages": with_system(turns, columns)}, columns), columns)


def read_prompt_completion(columns: Columns) -> Row:
    """Join prompt and completion; answers in a prompt of several turns are context, not targets."""
    prompt = turns_of(columns, "prompt", by="user", with_images=True)
    prompt, (completion,), notes = read_exchange(columns, prompt, ("completion",), with_images=True)
    row: dict[str, Any] = {"messages": [*prompt, *completion], **notes}
    if any(turn["role"] == "assistant" for turn in prompt):
        row["num_context_turns"] = len(prompt)
    return with_tools(attach_images(row, columns), columns)


def read_instruction(columns: Columns) -> Row:
    """Join instruction and input with an empty line, as in Alpaca."""
    question = "\n\n".join(part for part in (columns.text("instruction"), columns.optional_text("input")) if part)
    exchange = [{"role": "user", "content": question}, {"role": "assistant", "content": columns.text("output")}]
    row = {"messages": with_system(exchange, columns)}
    return with_tools(attach_images(row, columns), columns, has_tools=False)


def read_preference(columns: Columns) -> Row:
    """Return prompt and both answers as turns; the default prompt is the common start of both conversations."""
    has_prompt = columns.optional("prompt") is not None
    for name in () if has_prompt else (name for name in _PAIR if isinstance(columns.turns(name), str)):
        raise DataError(
            f"has no `prompt`, and {columns.title(name)} is text without one. Map the prompt with `columns`, "
            f"or convert the transcript to turns with a `template`: "
            f"`{name}: \"{{{{ {name} | transcript('Human:', 'Assistant:') }}}}\"`."
        )
    prompt = turns_of(columns, "prompt", by="user") if has_prompt else []
    prompt, (chosen, rejected), notes = read_exchange(columns, prompt, _PAIR)
    row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected, **notes}
    if columns.optional("margin") is not None:
        row["margin"] = columns.number("margin")
    return with_tools(row, columns)


def read_judged(columns: Columns) -> Row:
    """Return prompt and answer as turns, and whether the answer is good."""
    prompt = turns_of(columns, "prompt", by="user")
    prompt, (completion,), notes = read_exchange(columns, prompt, ("completion",))
    row = {"prompt": prompt, "completion": completion, "is_good": columns.truth("label"), **notes}
    return with_tools(row, columns)


_PAIR = ("chosen", "rejected")


def read_text_row(columns: Columns) -> Row:
    """Return the text."""
    return {"text": columns.text("text")}


def with_tools(row: Mapping[str, Any], columns: Columns, *, has_tools: bool = True) -> Row:
    """Return the row with its tools or `functions`, if its format has any, and its chat template arguments."""
    name = next((name for name in ("tools", "functions") if has_tools and columns.optional(name)), None)
    if name is not None:
        are_functions = name == "functions"
        tools = read_tools(columns.json_value(name), title=columns.title(name), are_functions=are_functions)
        row = {**row, "tools": tools} if tools else row
    if columns.optional(ARGUMENTS):
        arguments = read_template_arguments(columns.optional(ARGUMENTS), title=columns.title(ARGUMENTS))
        row = {**row, ARGUMENTS: arguments} if arguments else row
    return row


def read_image_label(columns: Columns) -> Row:
    """Return the image, whose file is read later, and its label."""
    image = columns.image(columns.value("image"), title=columns.title("image"))
    label = columns.labels("label")
    if not isinstance(label, str | int | None):
        raise DataError(f"{columns.title('label')} must be text or an integer, but is {describe(label)}.")
    return {"image": image, "label": label}


def read_scored_pairs(columns: Columns) -> Row:
    """Return both texts and their score."""
    texts = {"text": columns.text("sentence1"), "text_pair": columns.text("sentence2")}
    return {**texts, "score": columns.number("score")}


def read_group(columns: Columns) -> Row:
    """Return the anchor (the query of `retrieval`), its positive, and the negatives of both columns."""
    anchor = "query" if columns.names.format == "retrieval" else "anchor"
    row = {"anchor": columns.text(anchor), "positive": _only_text(columns, "positive")}
    return {**row, "negatives": read_negatives(columns)}


def read_negatives(columns: Columns) -> list[str]:
    """Return the negatives of both columns."""
    is_joined = "negatives" in columns.names.joined
    is_read_twice = "negative" in columns.names.joined.get("negatives", ())
    negatives = ["" if is_read_twice else columns.optional_text("negative")]
    if (value := columns.optional("negatives")) not in (None, ""):
        texts = list(value.values()) if is_joined else columns.json_value("negatives")
        title = columns.title("negatives")
        if not isinstance(texts, list):
            raise DataError(f"{title} must be a list of texts, but is {describe(texts)}.")
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise DataError(f"{title} must be a list of texts, but contains {describe(text)}.")
            negatives.append(text or "")
    # blank ones only pad rows to equal numbers
    return [text for text in negatives if text.strip()]


def _only_text(columns: Columns, column: str) -> str:
    """Return the text of a column, which may be a list of one text."""
    value = columns.value(column)
    if not isinstance(value, list):
        return columns.text(column)
    if len(value) != 1 or not isinstance(value[0], str):
        name = columns.names.columns.get(column, column)
        raise DataError(
            f"{columns.title(column)} is a list of {len(value)} values; a row has one {column}. Write a row for each, "
            f"or choose one with a `template`: `{column}: '{{{{ {name}[0] }}}}'`."
        )
    return value[0]
