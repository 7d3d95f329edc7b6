"""Running a chat template, here or in a process of its own. Imports no torch."""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def ready() -> bool:
    """Tell that all is imported."""
    return True


def render_chat(arguments: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and from where to where its generation markers reach, of what transformers' function takes."""
    texts, marked = render_jinja_template(**arguments)
    return texts[0], [(start, end) for start, end in marked[0]] if marked else []
