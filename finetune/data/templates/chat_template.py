"""Chat templates: setting one on a tokenizer, and detecting the end of turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from finetune.data.rows import Turn
from finetune.data.templates.rendering import TEMPLATE_FILE, render_chat
from finetune.errors import DataError
from finetune.registry.formats import TEMPLATES
from finetune.runtime.files.read import open_regular

BUILT_IN = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.jinja"))}
"""Templates that are chosen by name."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "chatml": (),  # its marks may be several tokens: the answer then ends with end-of-sequence
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "plain": (),  # it has no marks
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "zephyr": (),  # turns end with end-of-sequence; roles are plain text in its own tokenizer, too
}
"""The marks of each template that must be single tokens, as in the models for which it was made."""


MAX_TEMPLATE_BYTES = 1 << 20
"""The maximum size of a Jinja file with a chat template."""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Set the tokenizer's chat template to a built-in one or a Jinja file; None keeps its own.

    Raises DataError if the file cannot be read or is not valid Jinja, or if the tokenizer lacks tokens of the template.
    """
    if chat_template is None:
        return
    path = BUILT_IN.get(chat_template, Path(chat_template).expanduser())
    missing = [mark for mark in NEEDED.get(chat_template, ()) if len(tokenize(tokenizer, mark)) != 1]
    if missing:
        raise DataError(
            f"data.chat_template: {chat_template} requires the tokens {', '.join(missing)}, which this tokenizer does "
            "not have. Remove the key to use the tokenizer's own template, or write `chatml`, which works with any "
            "tokenizer."
        )
    is_named = chat_template in BUILT_IN or chat_template in TEMPLATES
    try:
        if chat_template in TEMPLATES:
            try:
                text = TEMPLATES.resolve(chat_template)()
            except Exception as error:
                message = f"the plugin's `{chat_template}` failed: {type(error).__name__}: {error}"
                raise DataError(f"data.chat_template: {message}") from error
            if not isinstance(text, str):
                raise TEMPLATES.refusal(chat_template, text, "the template as text")
            tokenizer.chat_template = text
        else:
            with open_regular(path) as file:
                content = file.read(MAX_TEMPLATE_BYTES + 1)
            if len(content) > MAX_TEMPLATE_BYTES:
                size = f"more than {MAX_TEMPLATE_BYTES >> 20} MB, too large for a template"
                raise DataError(f"data.chat_template: {path} has {size}.")
            tokenizer.chat_template = content.decode("utf-8")
        setattr(tokenizer, TEMPLATE_FILE, None if is_named else chat_template)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"data.chat_template: {chat_template} cannot be read: {reason}. "
            f"Give a Jinja file (beginning with `.`, `/` or `~`) or a built-in name: {', '.join(BUILT_IN)}."
        ) from error
    try:
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    except DataError as error:
        cause = error.__cause__
        if isinstance(cause, TemplateSyntaxError):
            line = f", line {cause.lineno}"
            raise DataError(f"data.chat_template: {chat_template}{line}: not valid Jinja: {cause}") from error
        if cause is None:  # the text is too long; a template may refuse this conversation
            raise DataError(f"data.chat_template: {error}") from error


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise DataError with the remedy if the tokenizer cannot render conversations."""
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template, so conversations cannot be rendered. "
            "Set data.chat_template: chatml, or a Jinja file."
        )


@dataclass(frozen=True)
class EndOfTurn:
    """The text that a template writes after an answer."""

    text: str  # empty if it writes nothing
    tokens: tuple[int, ...]
    final: str  # an end-of-sequence token that it writes only after the last answer's end-of-turn; usually empty
    special: tuple[str, ...]  # the texts of all special tokens

    def end_in(self, text: str, *, start: int, end: int) -> int:
        """Return the end of the answer in `text[start:end]`: after its end-of-turn, before whitespace."""
        body = text[start:end].rstrip()
        if body.endswith(self.special):
            return start + len(body)
        following = text[end : end + len(self.text) + 8]
        stripped = following.lstrip()
        if self.text and stripped.startswith(self.text):
            return end + len(following) - len(stripped) + len(self.text)
        return end

    def without_rest(self, text: str, *, start: int, end: int) -> int:
        """Return the end of the answer without trailing whitespace and a final end-of-sequence token."""
        body = text[start:end].rstrip()
        without_final = self.without_final(body)
        return start + len(body if without_final is None else without_final)

    def without_final(self, text: str) -> str | None:
        """Return the text without the end-of-sequence token after the last end-of-turn; None if there is none."""
        shorter = text.rstrip().removesuffix(self.final).rstrip()
        return shorter if self.final and shorter.endswith(self.text) and shorter != text.rstrip() else None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> EndOfTurn:
    """Return the text that the tokenizer's chat template writes after an answer, found by rendering one."""
    tokens: tuple[int, ...] = ()
    text, final = _text_after_answer(tokenizer)
    if text:
        tokens = tuple(tokenize(tokenizer, text))
        first_special = next((token for token in tokens if is_special(tokenizer, token)), None)
        if first_special is not None:  # the following tokens end the conversation, not the turn
            tokens, text = (first_special,), str(tokenizer.convert_ids_to_tokens(first_special))
    special = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    special |= set(tokenizer.all_special_tokens)
    return EndOfTurn(text, tokens, final if final != text else "", tuple(sorted(special)))


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end an answer: end-of-sequence, and the template's end-of-turn if it is a single token."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if tokenizer.chat_template:
        tokens = end_of_turn(tokenizer).tokens
        if tokens and is_special(tokenizer, tokens[0]):
            ids.add(tokens[0])
    return frozenset(ids)


def after_content(answer: str, *, content: str) -> str:
    """Return the rendered answer after its content, stripped: the template's end of turn.

    Returns the whole answer if the content is empty or not found in it, since a template may change it.
    """
    stripped = content.strip()
    start = answer.rfind(stripped) if stripped else -1
    return answer[start + len(stripped) :].strip() if start >= 0 else answer.strip()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text without adding special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def is_special(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """Return whether this is a special token, which ordinary text does not contain."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and bool(added.special))


_ANSWER = "Xyzzy"


def _text_after_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the text after an answer, and its end-of-sequence token if it is not written before another turn.

    Both are empty if the template refuses a question and an answer, both as text and as a list of parts.
    """
    for content in (_ANSWER, [{"type": "text", "text": _ANSWER}]):
        question: Turn = {"role": "user", "content": "a"}
        turns: list[Turn] = [question, {"role": "assistant", "content": content}]
        rendered, longer = _rendered(tokenizer, turns).rstrip(), _rendered(tokenizer, [*turns, question]).rstrip()
        if _ANSWER in rendered:
            final = tokenizer.eos_token or ""
            is_final = not longer.startswith(rendered) and longer.startswith(rendered.removesuffix(final))
            return after_content(rendered, content=_ANSWER), final if is_final else ""
    return "", ""


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn]) -> str:
    try:
        return render_chat(tokenizer, turns).text
    except DataError:
        return ""
