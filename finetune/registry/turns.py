"""Turns as other tools and providers write them: words for roles, names of keys, and words for "in the loss"."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from finetune.errors import RegistryError
from finetune.registry.table import Entry, Table

STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of chat templates, in the order in which they speak."""


@dataclass(frozen=True, kw_only=True)
class RoleEntry(Entry):
    """A word for a role, whose name is in lower case with underscores, and the role of chat templates that it means."""

    role: str
    is_call: bool = False  # the content of such a turn is the assistant's tool calls, as JSON

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.role not in STANDARD_ROLES:
            raise RegistryError(f"role `{self.name}`: `{self.role}` is not one of {', '.join(STANDARD_ROLES)}.")


_WORDS = {
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "model", "bot", "chatbot", "ai", "bard", "bing"),
    "tool": (
        *("function", "observation", "observations", "ipython"),
        *(f"{caller}_{result}" for caller in ("function", "tool") for result in ("response", "result", "output")),
    ),
}

ROLES = Table(
    "role",
    RoleEntry,
    (
        *(RoleEntry(name=role, role=role) for role in STANDARD_ROLES),
        *(RoleEntry(name=word, role=role) for role, words in _WORDS.items() for word in words),
        *(
            RoleEntry(name=word, role="assistant", is_call=True)
            for word in ("function_call", "function_calls", "tool_call", "tool_calls")
        ),
    ),
)
"""The roles of ShareGPT, OpenAI, Gemini, Cohere, LangChain, LLaMA-Factory, ms-swift and torchtune."""


@lru_cache(maxsize=1024)
def standard_word(word: str) -> str:
    """Return the word as the tables write it, in lower case with underscores."""
    return re.sub(r"[\s-]+", "_", word.strip()).lower()


def find_role(role: str) -> RoleEntry | None:
    """Return the entry of a role as a row writes it, in any case; None for an unknown one."""
    return ROLES.get(standard_word(role))


ROLE_KEYS = ("role", "from", "speaker", "author")
CONTENT_KEYS = ("content", "value", "parts", "message", "text")
"""The names of the two keys of a turn; the first present one is read."""

PAIRS = (
    ("input", "output"),
    ("question", "answer"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("instruction", "output"),
    ("query", "response"),
)
"""The keys of an item that is a question with its answer instead of a turn."""

WEIGHTS: Mapping[str, bool | None] = {
    **dict.fromkeys(("weight", "loss", "loss_weight", "loss_mask", "loss_scale", "compute_loss", "learn"), True),
    **dict.fromkeys(("train", "train_on", "trainable", "is_trainable", "training", "should_train"), True),
    **dict.fromkeys(("masked", "is_masked", "ignore", "ignored", "ignore_loss", "no_loss"), False),
    **dict.fromkeys(("mask", "train_detail", "training_detail"), None),
}
"""Keys that say whether a turn counts in the loss: whether 1 means that it does; None where tools differ on that."""
