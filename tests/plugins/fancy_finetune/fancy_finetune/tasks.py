"""A task: predict a text from its end to its beginning, with a weight on each token."""

from collections.abc import Mapping, Sequence

from finetune import register
from finetune.data.encoding.text import TextEncoder
from finetune.data.features import Features
from finetune.data.rows import Row
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext


class ReversedOptions(register.Section):
    """What the task reads of `plugin_options.reversed_pretrain`."""

    keep_first: int = register.key("Tokens that stay at the start.", 1, ge=0, le=16)
    by: str = register.key("What is reversed: `words` or `tokens`.", "tokens", pattern="^(words|tokens)$")


class ReversedText:
    """Encodes the text of a row and reverses it; small enough to be sent to other processes."""

    def __init__(self, encoder: TextEncoder, options: ReversedOptions) -> None:
        self.encoder, self.options = encoder, options

    def __call__(self, rows: Sequence[Row]) -> Sequence[object]:
        if self.options.by == "words":
            return self.encoder([{**row, "text": " ".join(reversed(str(row["text"]).split()))} for row in rows])
        return [self._reversed(outcome) for outcome in self.encoder(rows)]

    def _reversed(self, outcome: object) -> object:
        if not isinstance(outcome, Features):
            return outcome
        ids, start = outcome.arrays["input_ids"], self.options.keep_first
        turned = ids.copy()
        turned[start:] = ids[start:][::-1]
        arrays: Mapping = {**outcome.arrays, "input_ids": turned}
        return Features(arrays)


@register.task(
    "reversed_pretrain",
    description="predict texts from their end",
    head="causal_lm",
    formats=("text",),
    metrics=("loss", "perplexity", "token_accuracy"),
    may_share_rows=True,
    has_token_loss=True,
    smooths_labels=True,
    options=ReversedOptions,
)
class ReversedPretrain(CausalTask):
    """`pretrain`, from right to left."""

    def __init__(self, context: TaskContext, *, options: ReversedOptions) -> None:
        super().__init__(context)
        self._encoder = ReversedText(TextEncoder(self.tokenizer), options)
