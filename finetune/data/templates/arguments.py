"""Arguments of a chat template in addition to turns and tools, such as `enable_thinking`: a job's, and a row's own.

A job's stand in the tokenizer, under a name that transformers writes into `tokenizer_config.json` and reads from
there: they go with it to other processes, into the run folder and into the exported model.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from finetune.config.section import KeyLocations, join_key, with_location
from finetune.data.templates.sandbox import run_sandboxed
from finetune.data.templates.static_check import is_bounded, without_markers
from finetune.errors import DataError, Problem

Arguments = Mapping[str, Any]

RECORDED_AS = "chat_template_arguments"
"""The name in `tokenizer_config.json`."""

RESERVED = frozenset(
    (
        *("messages", "conversations", "conversation", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask", "tokenize", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "tokenizer_kwargs"),
    )
)
"""What the row or this package gives to every template."""


def arguments_of(tokenizer: PreTrainedTokenizerBase) -> Arguments:
    """Return the arguments that every conversation is rendered with."""
    found: Arguments = tokenizer.init_kwargs.get(RECORDED_AS) or {}
    return found


def set_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> None:
    """Have every conversation rendered with these arguments, and with no others that were set before."""
    tokenizer.init_kwargs.pop(RECORDED_AS, None)
    if arguments:
        tokenizer.init_kwargs[RECORDED_AS] = dict(arguments)


def use_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Arguments | None, locations: KeyLocations = MappingProxyType({})
) -> None:
    """Have every conversation rendered with a job's arguments; None leaves the tokenizer those that it brings.

    Raises DataError naming the key and the line of every argument that the chat template never reads.
    """
    if arguments is None:
        return
    problems = unread_problems(tokenizer, arguments, key="data.chat_template_arguments")
    if problems:
        raise DataError("\n".join(str(with_location(problem, locations)) for problem in problems))
    set_template_arguments(tokenizer, arguments)


def unread_problems(tokenizer: PreTrainedTokenizerBase, arguments: Arguments, *, key: str) -> list[Problem]:
    """Return a problem for each argument that the tokenizer's chat template does not read; `key` is theirs."""
    readable = readable_names(tokenizer)
    unread = [name for name in arguments if name not in readable]
    return [Problem(join_key(key, name), _describe_unread(name, readable)) for name in unread]


def readable_names(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names that the tokenizer's chat templates take from outside, as far as they can be set there."""
    template = tokenizer.chat_template
    templates = template.values() if isinstance(template, Mapping) else [template or ""]
    named = (name for each in templates for name in _names(str(each)))
    return frozenset(named) - RESERVED - _GLOBALS - set(tokenizer.special_tokens_map)


def own_arguments(value: Arguments, readable: frozenset[str]) -> Arguments:
    """Return a row's arguments without those that are absent; raises DataError for one that is not readable.

    A table has every column in every row: null is an absent argument, and so is an empty one that nothing reads.
    """
    kept = {name: each for name, each in value.items() if each is not None}
    unread = [name for name, each in kept.items() if name not in readable and each not in _EMPTY]
    if unread:
        raise DataError(
            f"`chat_template_kwargs`: {unread[0]}: {_describe_unread(unread[0], readable)} If it does not matter, "
            "leave the column out with `template: {chat_template_kwargs: '{}'}` next to `path`."
        )
    return {name: each for name, each in kept.items() if name in readable}


_EMPTY: tuple[Any, ...] = ("", [], {})
_GLOBALS = frozenset(("raise_exception", "strftime_now"))


def _describe_unread(name: str, readable: Iterable[str]) -> str:
    if name in RESERVED:
        return "this is no argument: it is given to the template from the row, or by `finetune` itself. Remove it."
    names = ", ".join(f"`{each}`" for each in sorted(readable))
    reads = f"It reads {names}." if names else "It takes no arguments."
    return f"the chat template never reads it. {reads}"


@lru_cache(maxsize=16)
def _names(template: str) -> frozenset[str]:
    """Return the names that the template takes from outside, found without running it."""
    try:
        if is_bounded(template):
            return frozenset(undeclared_names(template))
        return frozenset(run_sandboxed(undeclared_names, template, name="of the model", template=template))
    except (TemplateError, DataError):  # reported where it is rendered
        return frozenset()


def undeclared_names(template: str) -> list[str]:
    """Return the names that are not set on every way to where they are read; Jinja folds constants to find them."""
    parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(without_markers(template))
    return sorted(meta.find_undeclared_variables(parsed))
