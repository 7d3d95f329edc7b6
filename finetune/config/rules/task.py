"""Rules of `task:` - which data each task is trained on, and what it and its losses require."""

from collections.abc import Iterator, Mapping

from finetune.config.rules.sources import row_sources
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import Format
from finetune.config.sections.task import TaskName
from finetune.errors import Problem

_CHAT_FORMATS: tuple[Format, ...] = ("messages", "conversations", "prompt_completion", "instruction")

FORMATS_OF_TASK: Mapping[TaskName, tuple[Format, ...]] = {
    "sft": _CHAT_FORMATS,
    "pretrain": ("text",),
    "seq2seq": ("prompt_completion", "instruction"),
    "masked_lm": ("text",),
    "preference": ("preference", "judged"),
    "reward": ("preference",),
    "distillation": _CHAT_FORMATS,
    "text_classification": ("labelled",),
    "token_classification": ("tagged",),
    "image_classification": ("image_label",),
    "vision_language_sft": _CHAT_FORMATS,
}
"""The formats that each task learns from."""

CHAT_TASKS: tuple[TaskName, ...] = ("sft", "preference", "reward", "distillation", "vision_language_sft")
"""Tasks whose rows are rendered by a chat template."""

GENERATION_TASKS: tuple[TaskName, ...] = ("sft", "distillation", "vision_language_sft", "seq2seq")
"""Tasks that can be asked for an answer."""

CLASSIFICATION_TASKS: tuple[TaskName, ...] = ("text_classification", "token_classification", "image_classification")

PADDED_TASKS: tuple[TaskName, ...] = tuple(name for name in FORMATS_OF_TASK if name not in ("sft", "pretrain"))
"""Tasks whose samples do not share rows."""

WHOLE_ROW_TASKS: tuple[TaskName, ...] = ("seq2seq", "text_classification", "preference", "reward")
"""Tasks that learn from a row as a whole: windows of it would each have its label, or no answer to compare."""

TASKS_WITHOUT_TOKENS: tuple[TaskName, ...] = ("image_classification",)


def max_length_is_written(config: RunConfig) -> Iterator[Problem]:
    """What has tokens has a longest sample, on purpose."""
    if config.data.max_length is None and config.task.name not in TASKS_WITHOUT_TOKENS:
        message = "it is missing. Longest sample in tokens; what happens to longer rows is `data.over_length`."
        yield Problem("data.max_length", message)


def distillation_has_a_teacher(config: RunConfig) -> Iterator[Problem]:
    """Distillation has a teacher; what is kept of its answers is small."""
    section = config.task.distillation
    if config.task.name == "distillation" and section is None:
        yield Problem("task.distillation", "there is no teacher. Write `distillation: {teacher: NAME OR FOLDER}`.")
    if section is not None and section.cache and section.top_k is None:
        message = "a whole vocabulary for every target fills any disk. Write `task.distillation.top_k: 64`."
        yield Problem("task.distillation.cache", message)


def class_weights_fit_labels(config: RunConfig) -> Iterator[Problem]:
    """Each class has one name and one weight."""
    section = config.task.classification
    if len(set(section.labels)) < len(section.labels):
        yield Problem("task.classification.labels", "a name stands there twice. Write each class once.")
    if len(section.labels) == 1 and section.kind == "single_label" and config.task.name in CLASSIFICATION_TASKS:
        message = "one class alone is nothing to find out. Write two at least, or `kind: multi_label`."
        yield Problem("task.classification.labels", message)
    weights = section.class_weights
    if weights is None or weights == "balanced":
        return
    if not section.labels:
        message = "it is not known which weight is whose. Write `task.classification.labels` in the same order."
        yield Problem("task.classification.class_weights", message)
    elif len(weights) != len(section.labels):
        message = f"there are {len(weights)} weights for {len(section.labels)} labels. Write one for each."
        yield Problem("task.classification.class_weights", message)


def task_allows_packing(config: RunConfig) -> Iterator[Problem]:
    """Only causal language models learn from samples that share a row."""
    batching, task = config.data.batching, config.task.name
    if task not in PADDED_TASKS:
        return
    message = f"`task.name: {task}` pads its samples."
    if batching.padding_free is True:
        yield Problem("data.batching.padding_free", f"{message} Write `length_window_steps: 1` for less padding.")
    if batching.by == "packs" or (batching.by == "tokens" and task in TASKS_WITHOUT_TOKENS):
        yield Problem("data.batching.by", f"{message} Write `by: samples`.")


def task_allows_split_rows(config: RunConfig) -> Iterator[Problem]:
    """What is about a row as a whole is not asked of parts of it."""
    if config.data.over_length == "split" and config.task.name in WHOLE_ROW_TASKS:
        message = f"`task.name: {config.task.name}` learns from whole rows. Write `truncate` or `drop`."
        yield Problem("data.over_length", message)


def task_allows_cut_rows(config: RunConfig) -> Iterator[Problem]:
    """The tokens of an image are read together or not at all, so a row that shows images is not cut."""
    if config.task.name == "vision_language_sft" and config.data.over_length in ("truncate", "split"):
        message = "a cut could go through an image. Write `drop`, or a larger `data.max_length`."
        yield Problem("data.over_length", message)


def source_and_target_fit_the_batch(config: RunConfig) -> Iterator[Problem]:
    """A source and its target stand in one batch by tokens."""
    tokens, source = config.data.batching.tokens, config.data.max_length
    if config.task.name != "seq2seq" or config.data.batching.by != "tokens" or source is None:
        return
    longest = source + (config.task.seq2seq.max_target_length or source)
    if (tokens or 0) < longest:
        message = f"the longest source and the longest target are {longest} tokens together. Write at least that many."
        yield Problem("data.batching.tokens", message)


def masked_lm_masks_tokens(config: RunConfig) -> Iterator[Problem]:
    """Of the tokens that are predicted, some stand behind the mask."""
    section = config.task.masked_lm
    if section.random_fraction + section.kept_fraction > 1:
        message = "with `kept_fraction` it is more than 1: of the tokens that are predicted, which are to be hidden?"
        yield Problem("task.masked_lm.random_fraction", f"{message} Write less of one of them.")


def vision_language_has_a_processor(config: RunConfig) -> Iterator[Problem]:
    """What makes tokens of images and text comes with a model."""
    tokenizer = config.model.tokenizer
    if config.task.name == "vision_language_sft" and tokenizer is not None and tokenizer.train is not None:
        message = "a tokenizer alone reads no images. Write `name`: a model, or a folder with its processor."
        yield Problem("model.tokenizer.train", message)


TASK_RULES = (
    max_length_is_written,
    distillation_has_a_teacher,
    class_weights_fit_labels,
    task_allows_packing,
    task_allows_split_rows,
    source_and_target_fit_the_batch,
    masked_lm_masks_tokens,
    task_allows_cut_rows,
    vision_language_has_a_processor,
)


REFERENCE_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "kto")
"""Losses that compare the model with what it was before."""


def robust_loss_has_label_smoothing(config: RunConfig) -> Iterator[Problem]:
    """The robust loss knows how many pairs are the wrong way round."""
    section = config.task.preference
    if config.task.name == "preference" and section.loss == "robust" and section.label_smoothing == 0:
        message = "without it `robust` is `sigmoid`. Write the share of wrong pairs, such as `label_smoothing: 0.1`."
        yield Problem("task.preference.label_smoothing", message)


def judged_format_needs_kto(config: RunConfig) -> Iterator[Problem]:
    """Only KTO learns from answers that are judged one by one."""
    if config.task.name != "preference" or config.task.preference.loss == "kto":
        return
    for key, source in row_sources(config):
        if source.format == "judged":
            message = "only `task.preference.loss: kto` learns from single answers. Write it, or `format: preference`."
            yield Problem(f"{key}.format", message)


def precomputed_needs_stored_rows(config: RunConfig) -> Iterator[Problem]:
    """What is worked out for each sample before the first step needs samples that are there by then."""
    distillation = config.task.distillation
    if config.task.name == "preference" and config.task.preference.loss in REFERENCE_LOSSES:
        what = "the reference's log-probabilities are"
    elif config.task.name == "distillation" and distillation is not None and distillation.cache:
        what = "the teacher's answers (`task.distillation.cache`) are"
    else:
        return
    for key, source in row_sources(config):
        if getattr(source, "stream", None) is not None:
            yield Problem(f"{key}.stream", f"{what} worked out before the first step. Remove `stream`.")


PREFERENCE_RULES = (robust_loss_has_label_smoothing, judged_format_needs_kto, precomputed_needs_stored_rows)
