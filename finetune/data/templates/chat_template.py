"""Chat templates: setting one on a tokenizer, and what ends a turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from finetune.data.templates.rendering import render, set_template_file
from finetune.data.templates.sandbox import TemplateRefused, TemplateSyntax
from finetune.data.turns import Turn
from finetune.errors import DataError
from finetune.registry.formats import TEMPLATES
from finetune.runtime.files.read import open_regular

BUILT_IN = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jinja"))}
"""Templates that are chosen by name."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "chatml": (),  # its marks may be several tokens: end-of-sequence then ends the answer
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "zephyr": (),  # end-of-sequence ends its turns; its roles are plain text also in its own tokenizer
}
"""The marks of each that must be single tokens, or the model would be trained on other tokens than it was made with."""


MAX_TEMPLATE_BYTES = 1 << 20
"""Of the largest Jinja file that is read as a chat template."""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Give the tokenizer the built-in template or the Jinja file; None leaves it its own.

    Raises DataError when the file cannot be read or is not Jinja, and when the tokenizer lacks tokens of the template.
    """
    if chat_template is None:
        return
    path = BUILT_IN.get(chat_template, Path(chat_template).expanduser())
    _check_tokens(tokenizer, chat_template)
    is_named = chat_template in BUILT_IN or chat_template in TEMPLATES
    try:
        tokenizer.chat_template = _of_plugin(chat_template) if chat_template in TEMPLATES else _read(path)
        set_template_file(tokenizer, None if is_named else chat_template)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"data.chat_template: {chat_template} cannot be read: {error}. "
            f"Give a Jinja file (beginning with `.`, `/` or `~`) or a built-in name: {', '.join(BUILT_IN)}."
        ) from error
    _check_syntax(tokenizer, chat_template)


def _of_plugin(name: str) -> str:
    """Return the Jinja text of a plugin's template; raises DataError where it returns anything else."""
    try:
        text = TEMPLATES.resolve(name)()
        if not isinstance(text, str):
            raise TypeError(f"it returned a {type(text).__name__}, not text")
    except Exception as error:
        message = f"data.chat_template: the plugin's `{name}` failed: {type(error).__name__}: {error}"
        raise DataError(message) from error
    return text


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError with the remedy when the tokenizer cannot render a conversation."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be rendered. "
            "Set data.chat_template: chatml, or a Jinja file."
        )


@dataclass(frozen=True)
class EndOfTurn:
    """What a template writes after an answer."""

    text: str  # empty where it writes nothing
    tokens: tuple[int, ...]
    final: str  # an end-of-sequence that it writes after the last answer only, after the end-of-turn; mostly empty
    special: tuple[str, ...]  # the texts of all special tokens

    def end_in(self, text: str, *, start: int, end: int) -> int:
        """Return where the answer between two places of the text ends: after its end-of-turn, before whitespace."""
        body = text[start:end].rstrip()
        if body.endswith(self.special):
            return start + len(body)
        after = text[end : end + len(self.text) + 8]
        written = after.lstrip()
        if self.text and written.startswith(self.text):
            return end + len(after) - len(written) + len(self.text)
        return end

    def without_rest(self, text: str, *, start: int, end: int) -> int:
        """Return where the answer ends when the whitespace, and an end of the whole after its end-of-turn, are not."""
        body = text[start:end].rstrip()
        without_final = self.without_final(body)
        return start + len(body if without_final is None else without_final)

    def without_final(self, text: str) -> str | None:
        """Return the text without the end-of-sequence after the last end-of-turn; None where there is none."""
        shorter = text.rstrip().removesuffix(self.final).rstrip()
        return shorter if self.final and shorter.endswith(self.text) and shorter != text.rstrip() else None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> EndOfTurn:
    """Return what the tokenizer's chat template writes after an answer, found by rendering one."""
    tokens: tuple[int, ...] = ()
    text, final = _behind_an_answer(tokenizer)
    if text:
        tokens = tuple(tokenize(tokenizer, text))
        ends = next((token for token in tokens if is_special(tokenizer, token)), None)
        if ends is not None:  # what follows ends the whole, not the turn
            tokens, text = (ends,), str(tokenizer.convert_ids_to_tokens(ends))
    special = {str(each.content) for each in tokenizer.added_tokens_decoder.values() if each.special}
    special |= set(tokenizer.all_special_tokens)
    return EndOfTurn(text, tokens, final if final != text else "", tuple(sorted(special)))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: end-of-sequence, and the template's end-of-turn where it is one token."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        tokens = end_of_turn(tokenizer).tokens
        if tokens and is_special(tokenizer, tokens[0]):
            ids.add(tokens[0])
    return frozenset(ids)


def after_content(answer: str, *, content: str) -> str:
    """Return what a rendered answer holds after its content, without whitespace around: the template's end of turn.

    All of the answer when the content is empty or not found in it (a template may change it).
    """
    spoken = content.strip()
    start = answer.rfind(spoken) if spoken else -1
    return answer[start + len(spoken) :].strip() if start >= 0 else answer.strip()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of text that already holds every special token it needs: none is added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether the token is one that ordinary text cannot be made of."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and bool(added.special))


_ANSWER = "Xyzzy"


def _behind_an_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what is written after an answer, and of it an end-of-sequence that a further turn makes disappear.

    Both are empty where the template refuses a question and an answer, as words and as a list of parts.
    """
    for content in (_ANSWER, [{"type": "text", "text": _ANSWER}]):
        asked: Turn = {"role": "user", "content": "a"}
        turns: list[Turn] = [asked, {"role": "assistant", "content": content}]
        rendered, longer = (_rendered(tokenizer, these).rstrip() for these in (turns, [*turns, asked]))
        if _ANSWER in rendered:
            final = tokenizer.eos_token or ""
            is_final = not longer.startswith(rendered) and longer.startswith(rendered.removesuffix(final))
            return after_content(rendered, content=_ANSWER), final if is_final else ""
    return "", ""


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> str:
    try:
        return render(tokenizer, turns).text
    except DataError:
        return ""


def _read(path: Path) -> str:
    with open_regular(path) as file:
        content = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(content) > MAX_TEMPLATE_BYTES:
        raise DataError(f"data.chat_template: {path} has more than {MAX_TEMPLATE_BYTES >> 20} MB: this is no template.")
    return content.decode("utf-8")


def _check_tokens(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    missing = [mark for mark in NEEDED.get(chat_template, ()) if len(tokenize(tokenizer, mark)) != 1]
    if missing:
        raise DataError(
            f"data.chat_template: {chat_template} needs {', '.join(missing)} to be one token each, and this tokenizer "
            "does not know them. Leave the key out for the tokenizer's own template, or write `chatml`, which works "
            "with any tokenizer."
        )


def _check_syntax(tokenizer: PreTrainedTokenizerBase, chat_template: str) -> None:
    try:
        render(tokenizer, [{"role": "user", "content": "a"}])
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, TemplateSyntaxError | TemplateSyntax):
            line = f", line {cause.lineno}"
            raise DataError(f"data.chat_template: {chat_template}{line}: not valid Jinja: {cause}") from error
        if not isinstance(cause, TemplateRefused | TemplateError):
            raise DataError(f"data.chat_template: {error}") from error
