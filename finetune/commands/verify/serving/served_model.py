"""The answers of a serving engine that are compared with those of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from finetune.data.templates.rendering import Arguments
from finetune.data.turns import Turn
from finetune.errors import UserError

Prompt = str | Sequence[Turn]
"""The turns of a conversation, or the text that a model without a chat template continues."""


class ServingError(UserError):
    """The engine cannot be reached, or does not answer as its protocol says."""


@dataclass(frozen=True)
class ServedAnswer:
    """The greedy answer to a prompt."""

    text: str
    is_complete: bool  # it ended by itself, not at the limit of tokens
    num_prompt_tokens: int | None  # as the engine counts them
    log_probabilities: tuple[float, ...] = ()  # of its tokens, as far as the engine reports them


class ServedModel(Protocol):
    """A model in a serving engine; None marks a value that the engine does not return."""

    title: str
    name: str
    dtype: str | None  # in which it computes; None: that of the folder
    not_supported: dict[str, str]  # by feature, the reason why the engine does not offer it

    def prepare(self, arguments: Arguments, *, num_tokens: int) -> None:
        """Render prompts with these template arguments; rows and prompts have at most this number of tokens."""

    def prompt_ids(self, prompt: Prompt) -> Sequence[int] | None:
        """Return the tokens of the rendered prompt."""

    def text_ids(self, text: str) -> Sequence[int] | None:
        """Return the tokens of a text, with the special tokens that the engine adds."""

    def log_probabilities(self, ids: Sequence[int]) -> Sequence[float] | None:
        """Return the log-probability of each token but the first, given those before it."""

    def ends_answer(self, token: int, *, ids: Sequence[int]) -> bool | None:
        """Return whether an answer to `ids` ends at this token."""

    def answer(self, prompt: Prompt, *, max_tokens: int) -> ServedAnswer:
        """Return the greedy answer."""
