"""Chat template arguments in addition to turns and tools, such as `enable_thinking`, of a job and of single rows.

A job's arguments are stored in the tokenizer under a name that transformers writes to and reads from
`tokenizer_config.json`, so they accompany it to other processes, the run folder and the exported model.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from finetune.config.section import KeyLocations, join_key, with_location
from finetune.data.templates.sandbox import is_bounded, run_sandboxed, without_markers
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
    chat_template = tokenizer.chat_template
    templates = chat_template.values() if isinstance(chat_template, Mapping) else [chat_template or ""]
    names = (name for template in templates for name in _names(str(template)))
    return frozenset(names) - RESERVED - _GLOBALS - set(tokenizer.special_tokens_map)


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
        if is_bounded(template):
            return frozenset(undeclared_names(template))
        return frozenset(run_sandboxed(undeclared_names, template, name="of the model", template=template))
    except (TemplateError, DataError):  # reported when it is rendered
        return frozenset()


def undeclared_names(template: str) -> list[str]:
    """Return the names that may be read before they are set; Jinja folds constants to find them."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_markers(template))
    return sorted(meta.find_undeclared_variables(parsed))
