"""Rules of `run:`: what ends a run is in order."""

from collections.abc import Iterator

from finetune.config.run_config import RunConfig
from finetune.errors import Problem


def idle_comes_after_the_hang_report(config: RunConfig) -> Iterator[Problem]:
    """`run.on_end` does not shut a machine down before the report of a hang is written."""
    section, hang = config.run.on_end_section, config.run.hang_after_seconds
    if section is None or "idle" not in section.when or hang is None or section.idle_after_seconds > hang:
        return
    message = (
        f"a run without progress is idle after {section.idle_after_seconds:g} s, before its processes report where "
        f"they hang: run.hang_after_seconds is {hang:g}. Write `idle_after_seconds: {2 * hang:g}`, or leave `idle` out "
        "of `when`."
    )
    is_written = "idle_after_seconds" in section.model_fields_set
    yield Problem("run.on_end.idle_after_seconds" if is_written else "run.on_end", message)


RUN_RULES = (idle_comes_after_the_hang_report,)
