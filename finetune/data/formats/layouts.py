"""Recognize the layout of rows by names and kinds of columns, and return the keys of a job that reads them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from finetune.data.features import result_or_error
from finetune.data.formats.spans import read_span
from finetune.data.images import looks_like_images
from finetune.data.rows import Row
from finetune.data.turns import turn_keys
from finetune.registry.formats import FORMATS
from finetune.registry.layouts import LAYOUTS, LayoutEntry, Meaning, Reading, Speakers, shipped_layouts
from finetune.registry.tasks import TASKS
from finetune.registry.turns import WEIGHTS
from finetune.runtime.text.terminal import format_json

_KIND = re.compile(r"(?P<name>\w+)(?:\((?P<keys>[\w,]+)\))?")
_MAX_CLASS = 60
"""Characters of the longest text that is a class."""


def parsed_value(value: Any) -> Any:
    """Return the value of JSON text that holds a list or an object; any other value as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", value.strip(), re.IGNORECASE) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and str(value).lower() in (
        "true",
        "false",
        "0",
        "1",
        "0.0",
        "1.0",
    )


def _is_class(value: Any) -> bool:
    is_name = isinstance(value, str) and len(value) <= _MAX_CLASS and "\n" not in value and bool(value.strip())
    return is_name or isinstance(value, bool) or _is_integer(value)


def _list_of(test: Callable[[Any], bool], *, least: int = 0) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(items := parsed_value(value), list | tuple) and len(items) >= least and all(map(test, items))
    )


def is_text(value: Any) -> bool:
    """Return whether the value is text."""
    return isinstance(value, str)


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(turn_keys(value))


def _has_keys(value: Any, keys: Sequence[str]) -> bool:
    return isinstance(value, Mapping) and all(key in value for key in keys)


def _is_language(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and len(value) > 1
        and all(re.fullmatch(r"[a-z]{2,3}([_-]\w{2,4})?", str(name)) and is_text(text) for name, text in value.items())
    )


def speakers_of(texts: Sequence[Any]) -> Speakers | None:
    """Return the marks of the speakers that stand in all of the texts, user before assistant."""
    for speakers in shipped_layouts().transcripts:
        if texts and all(
            is_text(text) and -1 < text.find(speakers.user) < text.rfind(speakers.assistant) for text in texts
        ):
            return speakers
    return None


KINDS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": is_text,
    "number": _is_number,
    "share": lambda value: _is_number(value) and 0 <= (float(value) if isinstance(value, str) else value) <= 1,
    "integer": _is_integer,
    "digits": lambda value: isinstance(value, str) and value.strip().isdecimal(),
    "index": lambda value: str(value).lower() in ("0", "1", "true", "false"),
    "flag": _is_flag,
    "letter": lambda value: isinstance(value, str) and re.fullmatch(r"\s*[A-La-l]\s*", value) is not None,
    "class": _is_class,
    "classes": _list_of(_is_class),
    "flags": _list_of(_is_flag),
    "integers": _list_of(_is_integer),
    "texts": _list_of(is_text, least=1),
    "several_texts": _list_of(is_text, least=2),
    "words": _list_of(is_text),
    "tags": _list_of(lambda tag: tag is None or _is_class(tag)),
    "pairs": _list_of(_list_of(is_text, least=2)),
    "turn": _is_turn,
    "turns": _list_of(_is_turn, least=1),
    "tools": _list_of(lambda tool: isinstance(tool, Mapping)),
    "calls": _list_of(lambda call: _has_keys(call, ("name",)), least=1),
    "spans": _list_of(lambda span: isinstance(result_or_error(read_span, 1, span), tuple)),
    "image": looks_like_images,
    "images": _list_of(looks_like_images),
    "answer": lambda value: text_of_values([value]) is not None,
    "languages": _is_language,
    "transcript": lambda value: speakers_of([value]) is not None,
}
"""The tests of one value by kind; `object`, `objects` and a few others look at keys or at several rows."""


def value_test(kind: str, values: Sequence[Any]) -> Callable[[Any], bool]:
    """Return the test of the kind's values, in a column with these values."""
    match = _KIND.fullmatch(kind)
    assert match is not None, kind
    name, keys = match["name"], (match["keys"] or "").split(",")
    if name == "object":
        return lambda value: _has_keys(parsed_value(value), keys)
    if name == "objects":
        return _list_of(lambda item: _has_keys(item, keys), least=1)
    if name == "weighted_turns":
        turns = [turn for value in values if KINDS["turns"](value) for turn in parsed_value(value)]
        is_weighted = any(turn.get(name) is not None for turn in turns for name in WEIGHTS)
        return KINDS["turns"] if is_weighted else lambda value: False
    if name == "transcript" and speakers_of(values) is None:
        return lambda value: False
    if name == "joined":
        return is_text if any(is_text(value) and "|" in value for value in values) else lambda value: False
    if name == "prose":
        return is_text if is_prose(values) else lambda value: False
    return KINDS[name]


def is_prose(values: Sequence[Any]) -> bool:
    """Return whether most of the values are different texts of several words."""
    words = [value for value in values if is_text(value) and " " in value.strip()]
    return len(words) > len(values) / 2 and len(set(words)) > len(words) / 2


_TEXTS_OF_VALUES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (is_text, "{}"),
    (lambda value: isinstance(value, bool), "{{ 'yes' if {} else 'no' }}"),
    (_is_number, "{{ {} }}"),
    (_list_of(is_text), "{{ {}[0] if {} else '' }}"),
    (lambda value: _has_keys(value, ("text",)) and isinstance(value["text"], list), "{{ {}.text[0] if {}.text else "
     "'unanswerable' }}"),
    (lambda value: _has_keys(value, ("value",)), "{{ {}.value }}"),
    (lambda value: _has_keys(value, ("en",)), "{{ {}.en }}"),
)  # fmt: skip
"""For a kind of answer, its text: `{}` is the column."""


def text_of_values(values: Sequence[Any]) -> str | None:
    """Return how the text of these answers is written, `{}` for the column itself; None where there is no such way."""
    for test, text in _TEXTS_OF_VALUES:
        if values and all(map(test, values)):
            return text
    return None


def is_empty(value: Any) -> bool:
    """Return whether the value is null, blank text, or an empty list or object."""
    return (
        not value.strip()
        if isinstance(value, str)
        else value is None or (isinstance(value, list | tuple | Mapping) and not value)
    )


Role = tuple[str, ...]
"""The columns that have a role."""

_ROLE = re.compile(r"(?P<prefix>\?|\+\d?|)(?P<kinds>[^:]+): (?P<names>.+)")


def _normalized(name: object) -> str:
    return re.sub(r"[^a-z0-9]+", "_", str(name).strip().lower()).strip("_")


def _columns_named(columns: Iterable[str], names: str) -> Iterator[str]:
    """Yield the columns that have one of the names, in the order of the names."""
    normalized = {column: _normalized(column) for column in columns}
    others = [pattern[1:] for pattern in names.split() if pattern.startswith("-")]
    for pattern in names.split():
        for column, name in normalized.items():
            if fnmatchcase(name, pattern) and not any(fnmatchcase(name, other) for other in others):
                yield column


@dataclass(frozen=True)
class JobKeys:
    """The keys with which a job reads rows."""

    source: Mapping[str, Any]  # `format`, `columns` and `template` of the source
    task: str
    data: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task's section
    why: str = ""

    @property
    def format(self) -> str:
        """Return the name of the format."""
        return str(self.source["format"])

    @property
    def task_keys(self) -> Mapping[str, Any]:
        """Return the section `task`."""
        section = TASKS[self.task].section
        return {"name": self.task, **({section: dict(self.options)} if section and self.options else {})}


@dataclass(frozen=True)
class MatchedLayout:
    """Rows in a layout of the table, with the columns that have its roles."""

    entry: LayoutEntry
    roles: Mapping[str, Role]
    rows: Sequence[Row]

    def readings(self) -> Iterator[JobKeys]:
        """Yield the ways in which a job can read the rows, most likely first."""
        for reading in self.entry.readings:
            for column in self.roles[reading.each] if reading.each else ("",):
                yield self._keys(reading, {**self.roles, **({reading.each: (column,)} if reading.each else {})})

    def _keys(self, reading: Reading, roles: Mapping[str, Role]) -> JobKeys:
        first = next(iter(self._values(roles["messages"][0])), None) if "messages" in roles else None
        if (
            reading.format == "messages"
            and not reading.template
            and turn_keys(parsed_value(first)) == ("from", "value")
        ):
            reading = replace(reading, format="conversations", columns={"conversations": "messages"})
        columns: dict[str, Any] = {}
        template = {name: self._filled(text, roles) for name, text in reading.template.items()}
        for name in FORMATS[reading.format].columns:
            yours = roles.get(reading.columns.get(name, name))
            if yours is None or name in template:
                continue
            if name in _TEXTS and (text := text_of_values(self._values(yours[0]))) not in (None, "{}"):
                template[name] = str(text).replace("{}", _expression(yours[0]))
            elif name == "negatives" and len(yours) == 1 and all(map(is_text, self._values(yours[0]))):
                columns |= {"negative": yours[0]} if yours != ("negative",) else {}
            elif yours != (name,):
                columns[name] = yours[0] if len(yours) == 1 else list(yours)
        source = {"format": reading.format, "columns": columns, "template": template}
        task = "vision_language_sft" if "images" in roles and reading.task == "sft" else reading.task
        why = self._filled(reading.why, roles) or ", ".join(roles[reading.each] if reading.each else ())
        return JobKeys(
            {name: value for name, value in source.items() if value}, task, reading.data, reading.options, why
        )

    def _filled(self, text: str, roles: Mapping[str, Role]) -> str:
        """Return the template with the user's columns."""

        def fill(match: re.Match[str]) -> str:
            (column, *_), values = roles[match["role"]], self._values(roles[match["role"]][0])
            if match["detail"] == "|turns":
                speakers = speakers_of(values)
                marks = "" if speakers is None else _filter(speakers)
                return f"{{{{ {_expression(column)}{marks} }}}}"
            if match["detail"]:
                return str(list(values[0])[int(match["detail"][1:])])
            return _expression(column)

        text = re.sub(
            r"\[\[(\w+): (.*?)\]\]", lambda match: match[2] if match[1] in roles else "", text, flags=re.DOTALL
        )
        return re.sub(r"<(?P<role>\w+)(?P<detail>\.\d|\|turns)?>", fill, text)

    def _values(self, column: str) -> list[Any]:
        return _present(self.rows, column)

    def unused(self) -> list[str]:
        """Return the columns that the first reading does not read."""
        used = {column for columns in self.roles.values() for column in columns}
        formats = [reading.format for reading in self.entry.readings[:1]]
        used |= {column for form in formats for column in FORMATS[form].columns}
        return [column for column in _columns(self.rows) if column not in used]


_TEXTS = ("prompt", "completion", "instruction", "output", "positive")
"""The columns of formats whose values are texts, or turns."""


def _expression(column: str) -> str:
    is_name = re.fullmatch(r"[A-Za-z_]\w*", column) and column.lower() not in _JINJA_WORDS
    return column if is_name else f"row[{format_json(column)}]"


_JINJA_WORDS = ("and", "or", "not", "in", "is", "if", "else", "true", "false", "none", "loop", "row", "dict", "range")
"""Names that mean something else in a template."""


def _filter(speakers: Speakers) -> str:
    marks = [format_json(mark) for mark in (speakers.user, speakers.assistant)]
    named = [f"{name}={format_json(mark)}" for name in ("system", "tool", "end") if (mark := getattr(speakers, name))]
    return f" | transcript({', '.join([*marks, *named])})"


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _present(rows: Sequence[Row], column: str) -> list[Any]:
    return [value for row in rows if not is_empty(value := row.get(column))]


def recognize_all(rows: Sequence[Row]) -> Iterator[MatchedLayout]:
    """Yield the layouts that fit, in the order of the table; layouts of plugins first."""
    for entry in (*LAYOUTS, *shipped_layouts().layouts):
        roles = _assign(entry, rows)
        if roles is not None:
            yield MatchedLayout(entry, roles, rows)


def _assign(entry: LayoutEntry, rows: Sequence[Row]) -> dict[str, Role] | None:
    """Return the columns of each role; None where a role has none."""
    assigned: dict[str, Role] = {}
    columns = _columns(rows)
    for role, written in entry.roles.items():
        match = _ROLE.fullmatch(written)
        assert match is not None, f"{entry.name}.{role}: {written}"
        taken = {column for others in assigned.values() for column in others}
        fitting = tuple(
            column
            for column in dict.fromkeys(_columns_named(columns, match["names"]))
            if column not in taken and _fits(rows, column, match["kinds"], is_optional=match["prefix"] == "?")
        )
        prefix = match["prefix"]
        if fitting and len(fitting) >= int(prefix[1:] or 1):
            assigned[role] = fitting if prefix[:1] == "+" else fitting[:1]
        elif prefix != "?":
            return None
    return assigned


def _fits(rows: Sequence[Row], column: str, alternatives: str, *, is_optional: bool) -> bool:
    values = _present(rows, column)
    tests = [value_test(kind, values) for kind in alternatives.split("|")]
    return (is_optional or bool(values)) and all(any(test(value) for test in tests) for value in values)


def layout_hint(rows: Sequence[Row], *, form: str = "", has_meanings: bool = True) -> str:
    """Return what the rows look like, and how a job reads them; empty if that is unknown, or the format `form`.

    Without unread columns that change the meaning of a row, only rows that are not training rows count.
    """
    layout = next(recognize_all(rows), None)
    if layout is None:
        return ""
    keys = next(layout.readings(), None)
    if keys is None:
        return f"Each row is {layout.entry.description}. {layout.entry.remedy}"
    if keys.format == form or not has_meanings:
        return ""
    written = {**keys.source, **keys.data}
    return (
        f"Each row looks like {layout.entry.description}: `task: {format_json(keys.task_keys)}` with "
        f"`{format_json(written)}` reads it; `finetune preview FILE` prints these lines."
    )


def describe_unused(layout: MatchedLayout) -> Iterator[str]:
    """Yield a line about every unused column that changes what a row means, and one that lists the others."""
    unused = layout.unused()
    lists = [columns[0] for columns in layout.roles.values() if _is_first_read(layout, columns)]
    if lists:
        yield f"{', '.join(f'`{column}`' for column in lists)}: all but the first of each list"
    used = [_texts_in(row, [column for columns in layout.roles.values() for column in columns]) for row in layout.rows]
    repeated = [
        column
        for column in unused
        if all(_texts_in(row, [column]) <= texts for row, texts in zip(layout.rows, used, strict=True))
        and any(_texts_in(row, [column]) for row in layout.rows)
    ]
    meanings = unread_meanings([column for column in unused if column not in repeated], layout.rows)
    for column, meaning in meanings.items():
        yield f"`{column}` {meaning.says}: {meaning.remedy_of(column)}"
    if repeated:
        yield f"{', '.join(f'`{column}`' for column in repeated)}: repeated in what is read"
    others = [column for column in unused if column not in meanings and column not in repeated]
    if others:
        yield ", ".join(f"`{column}`" for column in others)


def _is_first_read(layout: MatchedLayout, columns: Role) -> bool:
    """Return whether the column has lists of texts; the first reading reads the first text."""
    templates = " ".join(next(layout.readings()).source.get("template", {}).values())
    has_more = any(isinstance(value, list) and len(value) > 1 for value in _present(layout.rows, columns[0]))
    return has_more and f"{_expression(columns[0])}[0] if" in templates


def _texts_in(row: Row, columns: Iterable[str]) -> set[str]:
    """Return all texts in these columns, at any depth."""
    level: list[Any] = [parsed_value(row.get(column)) for column in columns]
    texts: set[str] = set()
    while level:
        texts.update(value.strip() for value in level if isinstance(value, str))
        level = [
            child
            for value in level
            if isinstance(value, Mapping | list | tuple)
            for child in (value.values() if isinstance(value, Mapping) else value)
        ]
    return texts


def unread_meanings(columns: Iterable[str], rows: Sequence[Row], *, form: str | None = None) -> dict[str, Meaning]:
    """Return the columns with values that change what a row means, with their meanings.

    With the name of a format, only what matters to its rows.
    """
    meanings = {column: meaning_of(column) for column in columns if _present(rows, column)}
    return {
        column: meaning
        for column, meaning in meanings.items()
        if meaning is not None and (form is None or form in meaning.formats)
    }


def meaning_of(column: str) -> Meaning | None:
    """Return what a column with this name usually says about a row; None if it changes nothing."""
    return next(
        (meaning for meaning in shipped_layouts().meanings if any(_columns_named([column], meaning.names))), None
    )
