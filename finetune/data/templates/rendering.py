"""Renders turns with the chat template and its arguments, and finds generation markers and the text around turns.

The template arguments of a job, such as `enable_thinking`, are stored in the tokenizer under a name that transformers
writes to and reads from `tokenizer_config.json`, so they accompany it to other processes, the run folder and the
exported model. Single rows may have their own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import Environment, meta, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.config.section import KeyLocations, join_key, with_location
from finetune.data.rows import Turn
from finetune.data.templates.row_template import TEMPLATE_FAILURES, require_length_limit
from finetune.errors import DataError, Problem

Arguments = Mapping[str, Any]

RECORDED_AS = "chat_template_arguments"
"""The name in `tokenizer_config.json`."""

# fmt: off
RESERVED = frozenset({
    "messages", "conversations", "conversation", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "return_assistant_tokens_mask", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "tokenizer_kwargs",
})
# fmt: on
"""Names that the row or this package passes to every template."""


def arguments_of(tokenizer: PreTrainedTokenizerBase) -> Arguments:
    """Return the arguments with which every conversation is rendered."""
    arguments: Arguments = tokenizer.init_kwargs.get(RECORDED_AS) or {}
    return arguments


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> None:
    """Render every conversation with these arguments from now on, replacing earlier ones."""
    tokenizer.init_kwargs.pop(RECORDED_AS, None)
    if arguments:
        tokenizer.init_kwargs[RECORDED_AS] = dict(arguments)


def use_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Arguments | None, locations: KeyLocations = MappingProxyType({})
) -> None:
    """Render every conversation with a job's arguments; None keeps the tokenizer's own.

    Raises DataError naming the key and the line of every argument that the chat template does not read.
    """
    if arguments is None:
        return
    problems = unread_problems(tokenizer, arguments, key="data.chat_template_arguments")
    if problems:
        raise DataError("\n".join(str(with_location(problem, locations)) for problem in problems))
    set_template_arguments(tokenizer, arguments)


def unread_problems(tokenizer: PreTrainedTokenizerBase, arguments: Arguments, *, key: str) -> list[Problem]:
    """Return a problem for each argument that the tokenizer's chat template does not read; `key` is their key."""
    readable = readable_names(tokenizer)
    unread = [name for name in arguments if name not in readable]
    return [Problem(join_key(key, name), _describe_unread(name, readable)) for name in unread]


def readable_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of the arguments that the tokenizer's chat templates read."""
    names = frozenset().union(*map(_names, _templates(tokenizer)))
    return names - RESERVED - _GLOBALS - set(tokenizer.special_tokens_map)


class TemplateWords(NamedTuple):
    """The words of a chat template, in which are the keys and the roles of turns that it knows."""

    keys: frozenset[str]  # its attributes and texts
    roles: frozenset[str]  # texts that it compares with something, and keys of its objects


def known_words(tokenizer: PreTrainedTokenizerBase) -> TemplateWords:
    """Return the words of the tokenizer's chat templates, found without running them."""
    words = [_words(template) for template in _templates(tokenizer)]
    return TemplateWords(*(frozenset().union(*kind) for kind in zip(*words, strict=True)))


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    chat_template = tokenizer.chat_template
    return [*map(str, chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""])]


def own_arguments(value: Arguments, readable: frozenset[str]) -> Arguments:
    """Return a row's arguments without absent ones; raises DataError for one that the template does not read.

    A table has every column in every row: null is an absent argument, and so is an empty one that is not read.
    """
    present = {name: argument for name, argument in value.items() if argument is not None}
    unread = [name for name, argument in present.items() if name not in readable and argument not in _EMPTY]
    if unread:
        raise DataError(
            f"`chat_template_kwargs`: {unread[0]}: {_describe_unread(unread[0], readable)} If it does not matter, "
            "ignore the column with `template: {chat_template_kwargs: '{}'}` next to `path`."
        )
    return {name: argument for name, argument in present.items() if name in readable}


_EMPTY: tuple[Any, ...] = ("", [], {})
_GLOBALS = frozenset(("raise_exception", "strftime_now"))


def _describe_unread(name: str, readable: Iterable[str]) -> str:
    if name in RESERVED:
        return "this cannot be set: the template gets it from the row or from `finetune`. Remove it."
    names = ", ".join(f"`{name}`" for name in sorted(readable))
    reads = f"It reads {names}." if names else "It has no arguments."
    return f"the chat template does not read it. {reads}"


@lru_cache(maxsize=16)
def _names(template: str) -> frozenset[str]:
    """Return the undeclared names in the template, found without running it."""
    try:
        return frozenset(meta.find_undeclared_variables(_parse(template)))
    except TEMPLATE_FAILURES:  # reported when it is rendered
        return frozenset()


@lru_cache(maxsize=16)
def _words(template: str) -> TemplateWords:
    try:
        tree = _parse(template)
        attributes = frozenset(node.attr for node in tree.find_all(nodes.Getattr))
        compared = [text for node in tree.find_all((nodes.Compare, nodes.Pair)) for text in _texts(node)]
        return TemplateWords(attributes.union(_texts(tree)), frozenset(compared))
    except TEMPLATE_FAILURES:  # reported when it is rendered
        return TemplateWords(frozenset(), frozenset())


def _texts(node: nodes.Node) -> Iterator[str]:
    return (constant.value for constant in node.find_all(nodes.Const) if type(constant.value) is str)


def _parse(template: str) -> nodes.Template:
    """Parse the template without `{% generation %}` and its end, which only transformers' Jinja extension supports."""
    return Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKERS.sub("", template))


_MARKERS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


class ConversationRefused(DataError):
    """The template refuses a conversation, or a beginning of it, of `num_turns` turns."""

    num_turns = 0


Tools = Sequence[Mapping[str, Any]]
"""Tools that the assistant may call, as JSON schemas."""

TEMPLATE_FILE = "file_of_chat_template"
"""The attribute of a tokenizer that records the file of its chat template; it is pickled with the tokenizer."""


@dataclass(frozen=True)
class Rendering:
    """A conversation as text; `marked` are the character ranges between the template's generation markers."""

    text: str
    marked: tuple[tuple[int, int], ...] = ()


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[Turn],
    *,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
    add_generation_prompt: bool = False,
) -> Rendering:
    """Return the turns as `tokenizer.apply_chat_template` renders them, optionally with the generation prompt.

    Jinja's sandbox of transformers runs the template. The tokenizer's own template arguments are passed, overridden by
    `arguments`. Raises ConversationRefused with the template's message if it refuses the turns, DataError if the text
    is too long.
    """
    name: str | None = getattr(tokenizer, TEMPLATE_FILE, None)  # None: a built-in template, or the tokenizer's own
    try:
        template = str(tokenizer.get_chat_template(tools=tools))
        inputs = {
            # without absent values, which many templates would write as the word None
            "conversations": [[{key: part for key, part in turn.items() if part is not None} for turn in turns]],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
            "return_assistant_tokens_mask": has_markers(template),
            **tokenizer.special_tokens_map,
            **arguments_of(tokenizer),
            **(arguments or {}),
        }
        (text,), marked = render_jinja_template(**inputs)
    except TEMPLATE_FAILURES as error:
        roles = ", ".join(str(turn["role"]) for turn in turns)
        file = f" ({name})" if name else ""
        calls = any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns)
        hint = ". It may not support tool calls: set data.chat_template to one that writes them" if calls else ""
        reason = str(error) or type(error).__name__
        refusal = ConversationRefused(f"the chat template{file} refuses the conversation ({roles}): {reason}{hint}")
        refusal.num_turns = len(turns)
        raise refusal from error
    require_length_limit(text, template=name or "of the model")
    return Rendering(text, tuple((start, end) for start, end in marked[0]) if marked else ())


@lru_cache(maxsize=8)
def has_markers(template: str) -> bool:
    """Return whether the template marks the assistant's text with `{% generation %}`."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None


_PROBES = ("Xyzzy one", "Plugh two", "Xyzzy three", "Plugh four", "Xyzzy five")
_OF_CONTENT = re.compile("think|thought|reason|tool|function|call|image|video|audio", re.IGNORECASE)
"""Added tokens with such names mark parts of a turn's content, which rows may write themselves."""


def turn_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the added tokens, other than special ones, with which the chat template starts or ends turns."""
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if not token.special}
    added = {name for name in added if not _OF_CONTENT.search(name)}
    if not added or not tokenizer.chat_template:
        return frozenset()
    around_turns = "\n".join(text for rendered in _renderings(tokenizer) for text in _around(rendered))
    return frozenset(name for name in added if name.strip() and name in around_turns)


def _renderings(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    for as_parts in (False, True):
        turns: list[Turn] = [
            {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}
            for role, text in zip(("user", "assistant", "user", "assistant", "user"), _PROBES, strict=True)
        ]
        try:
            yield render_chat(tokenizer, turns, add_generation_prompt=True).text
            return
        except DataError:  # it may require a list of parts
            continue


def _around(rendered: str) -> Sequence[str]:
    """Return the texts between the contents of turns, and after the last one."""
    starts = [(rendered.find(content), content) for content in _PROBES]
    spans = [(start, start + len(content)) for start, content in starts if start >= 0]
    between = [rendered[end:start] for (_, end), (start, _) in pairwise(spans) if end <= start]
    return [*between, *(rendered[end:] for _, end in spans[-1:])]
