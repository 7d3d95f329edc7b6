"""Rules of `task.preference` - what a loss cannot do without, and what must be known before the first step."""

from collections.abc import Iterator

from finetune.config.rules.sources import sources
from finetune.config.run_config import RunConfig
from finetune.errors import Problem

WITH_REFERENCE = ("sigmoid", "hinge", "ipo", "robust", "kto")
"""Losses that compare the model with what it was before."""


def flips_are_told(config: RunConfig) -> Iterator[Problem]:
    """The robust loss knows how many pairs are the wrong way round."""
    section = config.task.preference
    if config.task.name == "preference" and section.loss == "robust" and section.label_smoothing == 0:
        message = "without it `robust` is `sigmoid`. Write the share of wrong pairs, such as `label_smoothing: 0.1`."
        yield Problem("task.preference.label_smoothing", message)


def judged_answers_are_for_kto(config: RunConfig) -> Iterator[Problem]:
    """Only KTO learns from answers that are judged one by one."""
    if config.task.name != "preference" or config.task.preference.loss == "kto":
        return
    for key, source in sources(config):
        if source.format == "judged":
            message = "only `task.preference.loss: kto` learns from single answers. Write it, or `format: preference`."
            yield Problem(f"{key}.format", message)


def known_beforehand_is_no_stream(config: RunConfig) -> Iterator[Problem]:
    """What is worked out for each sample before the first step needs samples that are there by then."""
    distillation = config.task.distillation
    if config.task.name == "preference" and config.task.preference.loss in WITH_REFERENCE:
        what = "the reference's log-probabilities are"
    elif config.task.name == "distillation" and distillation is not None and distillation.cache:
        what = "the teacher's answers (`task.distillation.cache`) are"
    else:
        return
    for key, source in sources(config):
        if getattr(source, "stream", None) is not None:
            yield Problem(f"{key}.stream", f"{what} worked out before the first step. Remove `stream`.")


PREFERENCE_RULES = (flips_are_told, judged_answers_are_for_kto, known_beforehand_is_no_stream)
