"""`sweep.html`: the curves of all runs on one page."""

import sys
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.sweep.results.ranking import RunResult
from finetune.runtime.optional import lazily

with lazily():  # it draws: only where there is something to draw
    from finetune.commands.compare import compare

PAGE = "sweep.html"
_FEWEST_RUNS, MAX_RUNS = 2, 20
"""Runs on the page, the best of them: more curves cannot be told apart."""


def write_page(results: Sequence[RunResult], folder: Path) -> Path | None:
    """Write the page of the best runs that have taken a step; return it, or None where fewer than two have.

    A page that cannot be drawn is a warning: it must not end a sweep.
    """
    runs = [each.folder for each in results if each.step > 0][:MAX_RUNS]
    if len(runs) < _FEWEST_RUNS:
        return None
    try:
        compare.write_comparison(runs, folder / PAGE)
    except Exception as error:
        print(f"warning: {folder / PAGE} cannot be written: {error}", file=sys.stderr, flush=True)
        return None
    return folder / PAGE
