"""What is known of each trainer whose configs can be read, and what their rows and prompts have in common."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from finetune.migration.draft import Draft
from finetune.migration.rules import Table

_INPUT = "{% if input is defined and input %}"
ALPACA_TEXT = (
    f"Below is an instruction that describes a task{_INPUT}, paired with an input that provides further context"
    "{% endif %}. Write a response that appropriately completes the request.\n\n"
    f"### Instruction:\n{{{{ instruction }}}}\n\n{_INPUT}### Input:\n{{{{ input }}}}\n\n{{% endif %}}"
    "### Response:{{ '\\n' }}"  # Jinja removes a line end at the end
)
"""The prompt of Stanford Alpaca, as a template of a row."""

ALPACA_ROWS = {"prompt": ALPACA_TEXT, "completion": "{{ output }}"}

CHAT_NAMES = re.compile(r"instruct|chat|-it\b|phi|qwen", re.IGNORECASE)
"""In the name of a model whose tokenizer has a chat template."""

BUILT_IN = {
    **{name: name for name in ("chatml", "gemma", "llama3", "mistral", "qwen", "zephyr")},
    **{"llama2": "mistral", "gemma2": "gemma", "mistral_v1": "mistral"},
}
"""Our chat templates by the peers' names; Llama 2 has the marks of Mistral."""


@dataclass(frozen=True)
class Peer:
    """A trainer: the table of its keys, the keys that only it has, and the functions that complete a job."""

    name: str
    title: str
    table: Table
    signs: frozenset[str]  # keys that tell its configs from others'
    prepare: Callable[[Draft], None]  # task, data and what only it has; before the common part
    finish: Callable[[Draft], None]  # its own defaults, where they are others; after the common part
