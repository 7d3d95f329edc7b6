"""Remedies for conversations whose targets cannot be located in the rendered text."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from finetune.data.rows import Turn
from finetune.data.templates.rendering import Arguments, ConversationRefused, Tools, render_chat
from finetune.errors import DataError

OTHER_TEMPLATES = (
    "`chatml` or to a Jinja file that marks the answers with {% generation %} (the `_training` variants that TRL ships "
    "do)"
)
REMEDY = (
    "Set data.train_on: each_assistant, which makes each answer a sample of its own, rendered as the model will be "
    "asked; or last_assistant, which trains on the last answer alone; or data.chat_template to "
    f"{OTHER_TEMPLATES}."
)
REMEDY_OF_GENERATION_PROMPT = (
    "The prompt at inference would differ from training. Give the turn the content that the generation prompt opens "
    "(such as its reasoning_content); or pass the argument that changes the prompt (data.chat_template_arguments: "
    f"{{enable_thinking: ...}}); or set data.chat_template to {OTHER_TEMPLATES}."
)


def explain_refusal(
    refusal: ConversationRefused,
    turns: Sequence[Turn],
    *,
    tools: Tools | None,
    arguments: Arguments | None,
    tokenizer: PreTrainedTokenizerBase,
    train_on: str | None,
) -> DataError:
    """Return the error of a template that refuses a beginning of these turns but renders all of them.

    It names what works instead; `train_on` is None where the task does not read it. Any other refusal is returned
    unchanged.
    """

    def is_rendered(turns: Sequence[Turn], *, is_prompt: bool) -> bool:
        try:
            render_chat(tokenizer, turns, tools=tools, arguments=arguments, add_generation_prompt=is_prompt)
        except ConversationRefused:
            return False
        return True

    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    if refusal.num_turns >= len(turns) or not answers or not is_rendered(turns, is_prompt=False):
        return refusal
    remedies = [f"data.chat_template to {OTHER_TEMPLATES}"]
    if train_on == "each_assistant":
        remedies = [f"data.train_on: assistant together with {remedies[0]}"]
    if train_on not in (None, "last_assistant") and is_rendered(turns[: answers[-1]], is_prompt=True):
        remedies.insert(0, "data.train_on: last_assistant, which trains on the last answer alone")
    before, _, reason = str(refusal).partition("refuses the conversation ")
    return DataError(
        f"{before}renders the conversation, but refuses it when it stops after turn {refusal.num_turns} "
        f"{reason.rstrip('.')}. Set {'; or '.join(remedies)}."
    )


def boundary_remedy(text: str, offset: int, *, contents: Sequence[str], is_start: bool) -> str:
    """Return what to change where a token crosses the start or the end of a target, by whose whitespace is there.

    `contents` are the contents of the turns, in order.
    """
    before, after = text[:offset], text[offset:]
    numbered = list(enumerate(contents, start=1))
    ends = [number for number, content in numbered if content[-1:].isspace() and before.endswith(content[-8:])]
    starts = [number for number, content in numbered if content[:1].isspace() and after.startswith(content[:8])]
    marker = "set data.chat_template to one that writes a single-token marker there."
    blank = _BLANKS.get(before[-1:] if ends else after[:1], "whitespace")
    if ends and is_start:
        return f"The prompt ends with {blank} (turn {ends[-1]}): remove it, or move it to the start of the completion."
    if ends or starts:
        where = f"Turn {ends[-1]} ends" if ends else f"Turn {starts[0]} starts"
        return f"{where} with {blank}: remove it, or {marker}"
    if before[-1:].isspace() or after[:1].isspace():
        return f"The whitespace there is that of the chat template: {marker}"
    start = "start the completion with a space or a line end, or " if is_start else ""
    return f"Nothing separates the two texts: {start}{marker}"


_BLANKS = {" ": "a space", "\n": "a line end", "\t": "a tab"}
