"""A schedule, a metric, and all that rows go through: a source, a format, a chat template."""

from collections.abc import Iterator, Sequence

from finetune import register


@register.schedule("sawtooth", decays=False)
def sawtooth(schedule: object, steps_done: int) -> float:
    """Return a factor that falls from 1 to 0.25 over four steps, again and again."""
    return 1.0 - 0.25 * (steps_done % 4)


@register.metric("same_length")
def same_length(answers: Sequence[str], references: Sequence[str]) -> float:
    """Return the share of answers with as many words as their reference."""
    pairs = list(zip(answers, references, strict=True))
    return sum(len(one.split()) == len(other.split()) for one, other in pairs) / max(1, len(pairs))


class CountingOptions(register.Section):
    """What the source reads of `plugin_options.counting`."""

    rows: int = register.key("How many rows there are.", 40, ge=1, le=10_000)


@register.source("counting", options=CountingOptions)
def counting(*, options: CountingOptions) -> Iterator[dict[str, str]]:
    """Yield a question and its answer for each number."""
    for number in range(options.rows):
        yield {"q": f"what follows {number}?", "a": " ".join(str(number + step) for step in range(1, 2 + number % 3))}


@register.format("question_answer", required=("q", "a"), like="messages")
def question_answer(columns: object) -> dict[str, object]:
    """Return the turns of a question and an answer."""
    turns = (("user", columns.text("q")), ("assistant", columns.text("a")))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@register.template("plain_turns")
def plain_turns() -> str:
    """Return a template with a line for each turn."""
    return (
        "{% for message in messages %}{{ message.role }}:\n{{ message.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
