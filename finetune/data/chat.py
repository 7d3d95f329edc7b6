"""Chat templates: setting one on a tokenizer, rendering turns, and what ends a turn."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from finetune.data.formats import Turn
from finetune.errors import DataError

BUILT_IN = {"chatml": Path(__file__).parent / "templates" / "chatml.jinja"}
"""Templates that are chosen by name."""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Give the tokenizer the built-in template or the Jinja file; None leaves it its own.

    Raises DataError when the file cannot be read or is not Jinja.
    """
    if chat_template is None:
        return
    path = BUILT_IN.get(chat_template, Path(chat_template).expanduser())
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template: {chat_template} cannot be read: {error}. "
            f"Give a Jinja file (beginning with `.`, `/` or `~`) or a built-in name: {', '.join(BUILT_IN)}."
        ) from error
    _check_syntax(tokenizer, chat_template)


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError with the remedy when the tokenizer cannot render a conversation."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be rendered. "
            "Set data.chat_template: chatml, or a Jinja file."
        )


def render(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], *, with_answer_cue: bool = False) -> str:
    """Return the turns as text; with the cue, as a prompt that the assistant is to continue.

    Raises DataError with the template's own words when it refuses the turns.
    """
    try:
        text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=with_answer_cue)
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DataError(f"the chat template refuses the conversation ({roles}): {error}") from error
    return str(text)


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: end-of-sequence, and the template's end-of-turn where it is one token."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        asked: list[Turn] = [{"role": "user", "content": "a"}]
        cue = render(tokenizer, asked, with_answer_cue=True)
        rendered = render(tokenizer, [*asked, {"role": "assistant", "content": "b"}])
        written = after_content(rendered[len(cue) :], content="b")
        tokens = tokenize(tokenizer, written)
        if tokens and is_special(tokenizer, tokens[0]):
            ids.add(tokens[0])
    return frozenset(ids)


def after_content(answer: str, *, content: str) -> str:
    """Return what a rendered answer holds behind its content, without whitespace around: the template's end of turn.

    All of the answer when the content is empty or not found in it (a template may change it).
    """
    spoken = content.strip()
    start = answer.rfind(spoken) if spoken else -1
    return answer[start + len(spoken) :].strip() if start >= 0 else answer.strip()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of text that already holds every special token it needs: none is added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Tell whether the token is one that ordinary text cannot be made of."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and bool(added.special))


def _check_syntax(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    try:
        render(tokenizer, [{"role": "user", "content": "a"}])
    except DataError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            line = error.__cause__.lineno
            raise DataError(
                f"data.chat_template: {chat_template}, line {line}: not valid Jinja: {error.__cause__}"
            ) from error
