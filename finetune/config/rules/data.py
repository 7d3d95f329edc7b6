"""Rules of `data:` beside those of its sources and of what a step is made of."""

from collections.abc import Iterator

from finetune.config.paths import is_path
from finetune.config.run_config import RunConfig
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem

TEMPLATES = ("chatml", "gemma", "llama3", "mistral", "qwen", "zephyr")
"""Chat templates that come with the package."""


def template_is_known(config: RunConfig) -> Iterator[Problem]:
    """A chat template is one of ours or a file."""
    template = config.data.chat_template
    if template is not None and template not in TEMPLATES and not is_path(template):
        hint = did_you_mean(template, TEMPLATES) or f"Write {listed(TEMPLATES)}."
        message = f"there is no template `{template}`. {hint} A file begins with `.`, `/` or `~`: `./{template}`."
        yield Problem("data.chat_template", message)


DATA_RULES = (template_is_known,)
