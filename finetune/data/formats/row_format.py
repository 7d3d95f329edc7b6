"""Formats: the meaning of a row's columns. They return `messages`, `text`, a preference pair or labelled data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, cast

from finetune.config.sections.data import SourceSection
from finetune.data.formats.columns import ColumnNames, Columns, quoted_list
from finetune.data.images import ImageRoot
from finetune.data.rows import (
    ARGUMENTS,
    FAULTS_OF_VALUES,
    Part,
    RawRow,
    Row,
    Turn,
    describe,
    has_images,
    is_image,
    read_template_arguments,
    read_tools,
    read_turns,
)
from finetune.data.templates.row_template import WHOLE_ROW, check_row_template, columns_used
from finetune.errors import DataError
from finetune.registry.formats import FORMATS
from finetune.registry.plugins import code_identity


def read_labelled(columns: Columns) -> Row:
    """Return `text`, optionally `text_pair`, and `label`: a label or a number, or a list of these."""
    label = columns.labels("label")
    if not all(isinstance(value, str | int | float) for value in (label if isinstance(label, list) else [label])):
        raise DataError(
            f"{columns.title('label')} must be text, a number or a boolean, or a list of texts or numbers, but is "
            f"{describe(label)}."
        )
    row = {"text": columns.text("text"), "label": label}
    return row if columns.optional("text_pair") is None else {**row, "text_pair": columns.text("text_pair")}


def read_tagged(columns: Columns) -> Row:
    """Return the words and the tag of each."""
    words, tags = columns.value("tokens"), columns.labels("tags")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise DataError(f"{columns.title('tokens')} must be a list of texts, but is {describe(words)}.")
    if not isinstance(tags, list) or not all(isinstance(tag, str | int) for tag in tags):
        raise DataError(f"{columns.title('tags')} must be a list of texts or numbers, but is {describe(tags)}.")
    if len(words) != len(tags):
        raise DataError(
            f"{columns.title('tokens')} has {len(words)} words and {columns.title('tags')} {len(tags)} tags. "
            "Each word needs one tag."
        )
    return {"tokens": words, "tags": tags}


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


class UnknownFormat(DataError):
    """The columns of the first row match no format."""


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
            read = self._read(Columns(self.names, row, origin=raw.origin))
            if not isinstance(read, Mapping):
                like = FORMATS[self.names.format].like
                raise FORMATS.refusal(self.names.format, read, f"a row as the format `{like}` returns it, a dictionary")
            return read
        except (DataError, *FAULTS_OF_VALUES) as error:
            raise DataError(f"{raw.location}: {error}") from error

    def identity(self) -> Any:
        """Return the names of the format and of its columns, and the templates."""
        names, code = self.names, code_identity(FORMATS[self.names.format])
        mappings = [dict(sorted(mapping.items())) for mapping in (names.columns, names.template)]
        parts: list[Any] = [names.format, *code, *mappings]
        if names.image_root is not None and names.image_root.counts_from is not None:
            parts.append(str(names.image_root.counts_from))
        if names.has_arguments:
            parts.append(ARGUMENTS)
        if names.classes:
            parts.append({column: list(class_names) for column, class_names in names.classes.items()})
        return parts


def choose_format(
    section: SourceSection,
    first: RawRow,
    *,
    key: str,
    log: Callable[[str], None],
    class_names: Callable[[], Mapping[str, Sequence[str]]] = dict,
    image_root: ImageRoot | None = None,
) -> ColumnFormat:
    """Return the configured format, or the one detected from the columns of the first row; log it and unread columns.

    `image_root` has the folders of image files. `class_names` returns the dataset's names for integer labels, which
    replace them. Raises DataError if no format fits, if `columns` or `template` has a column that the format does not
    have, or if a template is not valid Jinja.
    """
    for column, written in section.template.items():
        check_row_template(written, key=f"{key}.template.{column}")
    row = first.parse()
    name = section.format or _detect(section, first, key=key)
    expected = FORMATS[name].columns
    by_template = {name for written in section.template.values() for name in columns_used(written)}
    by_name = {section.column_names.get(column, column) for column in expected if column not in section.template}
    is_whole_read = WHOLE_ROW in by_template
    unread = [] if is_whole_read else [name for name in row if name not in by_template | by_name]
    if section.format is None:
        used = [column for column in _available(section, row) if column not in unread]
        log(f"{key}.format is not set: the columns {quoted_list(used)} are read as `{name}`")
    for field, columns in (("columns", section.column_names), ("template", section.template)):
        for column in columns:
            if column not in expected:
                raise DataError(
                    f"{key}.{field}: format `{name}` has no column `{column}`; it has {quoted_list(expected)}. "
                    "Write the format's name first, then yours: {completion: answer}."
                )
    if unread:
        log(f"{key}: unused columns: {quoted_list(unread)}")
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
        classes=classes,
        image_root=image_root,
        has_arguments=ARGUMENTS in expected and ARGUMENTS in row,
    )
    return ColumnFormat(column_names)


def _detect(section: SourceSection, first: RawRow, *, key: str) -> str:
    available = _available(section, first.parse())
    for form in (form for form in FORMATS if not form.plugin):  # a plugin's is only read where it is named
        has_required = all(section.column_names.get(column, column) in available for column in form.required)
        if has_required and all(column in form.columns for column in (*section.column_names, *section.template)):
            return form.name
    choices = "; ".join(f"{form.name}: {quoted_list(form.required)}" for form in FORMATS)
    raise UnknownFormat(
        f"{first.location}: cannot tell the format from its columns {quoted_list(available)}. Set {key}.format and map "
        f"its columns with {key}.columns (for example {{prompt: question, completion: answer}}), or write a "
        f"{key}.template. Formats are {choices}."
    )


def _available(section: SourceSection, row: Row) -> tuple[str, ...]:
    """Return the columns available to a format: those of templates, then the row's."""
    return tuple(dict.fromkeys((*section.template, *row)))


def read_messages(columns: Columns) -> Row:
    """Return the turns."""
    turns = read_turns(columns.json_value("messages"), title=columns.title("messages"), with_images=True)
    return _with_tools(attach_images({"messages": turns}, columns), columns)


def read_conversations(columns: Columns) -> Row:
    """Return the turns of a ShareGPT conversation."""
    value, title = columns.json_value("conversations"), columns.title("conversations")
    turns = [*_system(columns), *read_turns(value, title=title, with_images=True, from_speakers=True)]
    return _with_tools(attach_images({"messages": turns}, columns), columns)


def read_prompt_completion(columns: Columns) -> Row:
    """Join prompt and completion; answers in a prompt of several turns are context, not targets."""
    prompt = _turns_of(columns, "prompt", by="user", with_images=True)
    completion = _turns_of(columns, "completion", by="assistant", with_images=True)
    row: dict[str, Any] = {"messages": [*prompt, *completion]}
    if any(turn["role"] == "assistant" for turn in prompt):
        row["num_context_turns"] = len(prompt)
    return _with_tools(attach_images(row, columns), columns)


def read_instruction(columns: Columns) -> Row:
    """Join instruction and input with an empty line, as in Alpaca."""
    question = "\n\n".join(part for part in (columns.text("instruction"), columns.optional_text("input")) if part)
    exchange = [{"role": "user", "content": question}, {"role": "assistant", "content": columns.text("output")}]
    turns = [*_system(columns), *exchange]
    return _with_tools(attach_images({"messages": turns}, columns), columns, has_tools=False)


def read_preference(columns: Columns) -> Row:
    """Return prompt and both answers as turns; the default prompt is the common start of both conversations."""
    sides = {name: _turns_of(columns, name, by="assistant") for name in ("chosen", "rejected")}
    if columns.optional("prompt") is not None:
        prompt = _turns_of(columns, "prompt", by="user")
    else:
        if isinstance(columns.value("chosen"), str) or isinstance(columns.value("rejected"), str):
            raise DataError(
                f"has no `prompt`, and {columns.title('chosen')} is text without one. Map the prompt with `columns`, "
                f"or convert the transcript to turns with a `template`."
            )
        pairs = zip(sides["chosen"][:-1], sides["rejected"][:-1], strict=False)
        prompt = [turn for turn, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        sides = {name: turns[len(prompt) :] for name, turns in sides.items()}
    row: dict[str, Any] = {"prompt": prompt, **sides}
    if columns.optional("margin") is not None:
        row["margin"] = columns.number("margin")
    return _with_tools(row, columns)


def read_judged(columns: Columns) -> Row:
    """Return prompt and answer as turns, and whether the answer is good."""
    prompt, completion = _turns_of(columns, "prompt", by="user"), _turns_of(columns, "completion", by="assistant")
    return _with_tools({"prompt": prompt, "completion": completion, "is_good": columns.truth("label")}, columns)


def read_text(columns: Columns) -> Row:
    """Return the text."""
    return {"text": columns.text("text")}


def _turns_of(columns: Columns, column: str, *, by: str, with_images: bool = False) -> list[Turn]:
    """Return the turns of a column, which is the text of one turn or a list of turns."""
    value = columns.value(column)
    if isinstance(value, list):
        return read_turns(value, title=columns.title(column), with_images=with_images)
    return [{"role": by, "content": columns.text(column)}]


def _system(columns: Columns) -> list[Turn]:
    value = columns.optional_text("system")
    return [{"role": "system", "content": value}] if value else []


def _with_tools(row: Mapping[str, Any], columns: Columns, *, has_tools: bool = True) -> Row:
    """Return the row with its tools, if its format has any, and its chat template arguments."""
    if has_tools and columns.optional("tools"):
        tools = read_tools(columns.json_value("tools"), title=columns.title("tools"))
        row = {**row, "tools": tools} if tools else row
    if columns.optional(ARGUMENTS):
        arguments = read_template_arguments(columns.optional(ARGUMENTS), title=columns.title(ARGUMENTS))
        row = {**row, ARGUMENTS: arguments} if arguments else row
    return row


def read_image_label(columns: Columns) -> Row:
    """Return the image, whose file is read later, and its label."""
    image = columns.image(columns.value("image"), title=columns.title("image"))
    label = columns.labels("label")
    if not isinstance(label, str | int):
        raise DataError(f"{columns.title('label')} must be text or an integer, but is {describe(label)}.")
    return {"image": image, "label": label}


PLACEHOLDER = "<image>"
"""LLaVA's image placeholder in plain text (Liu et al., 2023, arXiv:2304.08485), independent of the model's own."""


def attach_images(row: Row, columns: Columns) -> Row:
    """Return the row with `messages` and its `images`; for each image, a turn has a part `{type: image}`.

    Images are in the parts themselves or in the column `images`, in the order of the parts without an image, or of the
    placeholders `<image>` in plain texts; with neither, they are put before the first question. A row without images is
    returned unchanged. Raises DataError if the numbers of placeholders and images differ.
    """
    value = columns.optional("images")
    given = value if isinstance(value, list | tuple) else [value]
    given = [image for image in given if image is not None]
    messages: Sequence[Turn] = row["messages"]
    if any(has_images(turn.get("content")) for turn in messages):
        placed = messages
    elif given:
        placed = _placed(messages, num_images=len(given))
    else:
        return row
    for number, turn in enumerate(placed, start=1):
        if turn["role"] == "assistant" and has_images(turn.get("content")):
            raise DataError(f"turn {number} is an answer with an image, but the model can only generate text.")
    sources = _sources(placed, given)
    images = [columns.image(source, title=f"image {number}") for number, source in enumerate(sources, start=1)]
    turns = []
    for turn in placed:
        content = turn.get("content")
        if isinstance(content, list):
            content = [{"type": "image"} if is_image(part) else part for part in content]
            turn = {**turn, "content": content}
        turns.append(turn)
    return {**row, "messages": turns, "images": images}


def _placed(messages: Sequence[Turn], *, num_images: int) -> Sequence[Turn]:
    """Return the turns with an image part for each placeholder, or with all images before the first question."""
    if any(PLACEHOLDER in _text(turn) for turn in messages):
        turns = []
        for turn in messages:
            first, *others = _text(turn).split(PLACEHOLDER)
            if others:  # without the whitespace around placeholders, which the template writes
                parts = _text_part(first.rstrip())
                for text in others:
                    parts += [{"type": "image"}, *_text_part(text.strip())]
                turn = {**turn, "content": parts}
            turns.append(turn)
        return turns
    question = next((index for index, turn in enumerate(messages) if turn["role"] == "user"), None)
    if question is None:
        raise DataError(f"has {_count(num_images)}, but no user turn to put it in.")
    parts = [{"type": "image"}] * num_images + _text_part(_text(messages[question]))
    return [{**turn, "content": parts} if index == question else turn for index, turn in enumerate(messages)]


def _text_part(text: str) -> list[Part]:
    return [{"type": "text", "text": text}] if text else []


def _sources(messages: Sequence[Turn], given: Sequence[Any]) -> list[Any]:
    """Return the images in the order of the turns; raises DataError unless every image is in a turn."""
    parts = [part for turn in messages for part in turn.get("content") or () if is_image(part)]
    placeholders = [part for part in parts if "image" not in part]
    if len(placeholders) != len(given):
        raise DataError(
            f"has {_count(len(given))} in its column and {len(placeholders)} placeholders in its turns. Write one "
            f"placeholder for each, `{PLACEHOLDER}` in a text or a part `{{type: image}}`, or none: they are then put "
            f"before the first question."
        )
    indices = [part.get("index", number) for number, part in enumerate(placeholders)]
    if sorted(indices) != list(range(len(given))):
        raise DataError(
            f"has image parts with the `index` {indices}, which do not refer to each of its images exactly once."
        )
    ordered = iter([given[index] for index in indices])
    return [part["image"] if "image" in part else next(ordered) for part in parts]


def _text(turn: Turn) -> str:
    content = turn.get("content")
    return content if isinstance(content, str) else ""


def _count(number: int) -> str:
    return f"{number} image{'' if number == 1 else 's'}"


def read_scored_pairs(columns: Columns) -> Row:
    """Return both texts and their score."""
    texts = {"text": columns.text("sentence1"), "text_pair": columns.text("sentence2")}
    return {**texts, "score": columns.number("score")}


def read_group(columns: Columns) -> Row:
    """Return the anchor (the query of `retrieval`), its positive, and the negatives of both columns."""
    anchor = "query" if columns.names.format == "retrieval" else "anchor"
    row = {"anchor": columns.text(anchor), "positive": columns.text("positive")}
    single = columns.optional_text("negative")
    negatives = [single]
    if columns.optional("negatives") not in (None, ""):
        texts, title = columns.json_value("negatives"), columns.title("negatives")
        if not isinstance(texts, list):
            raise DataError(f"{title} must be a list of texts, but is {describe(texts)}.")
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise DataError(f"{title} must be a list of texts, but contains {describe(text)}.")
            negatives.append(text or "")
    # blank ones only pad rows to equal numbers
    return {**row, "negatives": [text for text in negatives if text.strip()]}
