"""Rules of `task:`: the requirements of each task and its losses."""

from collections.abc import Iterator, Sequence

from finetune.config.formatting import format_list
from finetune.config.rules.sources import row_sources
from finetune.config.run_config import RunConfig
from finetune.errors import Problem
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, RERANKING_LOSSES, PairLossEntry
from finetune.registry.table import Table
from finetune.registry.tasks import TASKS


def samples_fit_the_task(config: RunConfig) -> Iterator[Problem]:
    """The length is an explicit choice for tasks that read tokens; some tasks pad their samples, or need whole rows."""
    if config.data.max_length is None and TASKS[config.task.name].has_tokens:
        message = (
            "the key is missing: the maximum length of a sample in tokens; `data.over_length` handles longer rows."
        )
        yield Problem("data.max_length", message)
    batching, task = config.data.batching, TASKS[config.task.name]
    if batching.padding_free is True and not task.may_share_rows:
        message = f"`task.name: {task.name}` pads its samples. Remove the key."
        yield Problem("data.batching.padding_free", message)
    if batching.by == "packs" and not task.may_be_packed:
        message = f"`task.name: {task.name}` is not trained on packs. Write `by: samples`"
        instead = "; `padding_free` avoids padding." if task.may_share_rows else "."
        yield Problem("data.batching.by", f"{message}{instead}")
    if batching.by == "tokens" and not task.has_tokens:
        yield Problem("data.batching.by", f"`task.name: {task.name}` has no tokens. Write `by: samples`.")
    over_length = config.data.over_length
    if task.reads != "images" and over_length not in ("refuse", *task.over_length):
        reason = "this could cut through an image" if task.has_images else f"`task.name: {task.name}` needs whole rows"
        instead = format_list(task.over_length, last="or")
        yield Problem("data.over_length", f"{reason}. Write {instead}, or a larger `data.max_length`.")


def sections_of_tasks_fit(config: RunConfig) -> Iterator[Problem]:
    """Distillation has a teacher, whose top-k probabilities alone are cached; fractions add up to at most 1."""
    section = config.task.distillation
    if config.task.name == "distillation" and section is None:
        yield Problem("task.distillation", "there is no teacher. Write `distillation: {teacher: NAME OR FOLDER}`.")
    if section is not None and section.cache and section.top_k is None:
        message = "caching the whole vocabulary for every target would fill the disk. Set `top_k: 64`."
        yield Problem("task.distillation.cache", message)
    if config.task.masked_lm.random_fraction + config.task.masked_lm.kept_fraction > 1:
        message = "together with `kept_fraction` it exceeds 1. Reduce one of them."
        yield Problem("task.masked_lm.random_fraction", message)


def class_weights_fit_labels(config: RunConfig) -> Iterator[Problem]:
    """Each class has one name and one weight."""
    section = config.task.classification
    if len(set(section.labels)) < len(section.labels):
        yield Problem("task.classification.labels", "a class is listed twice. List each class once.")
    if len(section.labels) == 1 and section.kind == "single_label" and TASKS[config.task.name].classifies:
        message = "a single class cannot be classified. List at least two, or use `kind: multi_label`."
        yield Problem("task.classification.labels", message)
    weights = section.class_weights
    if weights is None or weights == "balanced":
        return
    if not section.labels:
        message = "the order of the weights is undefined. Write `task.classification.labels` in the same order."
        yield Problem("task.classification.class_weights", message)
    elif not any(weights):
        message = "with only weights of 0 nothing is trained. Write a weight above 0 for at least one class."
        yield Problem("task.classification.class_weights", message)
    elif len(weights) != len(section.labels):
        message = f"there are {len(weights)} weights for {len(section.labels)} labels. Write one weight per label."
        yield Problem("task.classification.class_weights", message)


def preference_loss_fits(config: RunConfig) -> Iterator[Problem]:
    """The robust loss needs the fraction of wrong pairs; only some losses read labels of single answers (`judged`)."""
    section = config.task.preference
    if config.task.name != "preference":
        return
    if section.loss == "robust" and section.label_smoothing == 0:
        message = "`robust` without it is `sigmoid`. Write the fraction of wrong pairs, such as `label_smoothing: 0.1`."
        yield Problem("task.preference.label_smoothing", message)
    able = _written("preference", [entry.name for entry in PREFERENCE_LOSSES if "judged" in entry.formats])
    for key, source in row_sources(config):
        if source.format == "judged" and "judged" not in PREFERENCE_LOSSES[section.loss].formats:
            message = f"only {able} trains on single answers. Write that, or `format: preference`."
            yield Problem(f"{key}.format", message)


def precomputed_needs_stored_rows(config: RunConfig) -> Iterator[Problem]:
    """Precomputed values of every sample cannot be used with a stream."""
    distillation = config.task.distillation
    if config.task.name == "preference" and PREFERENCE_LOSSES[config.task.preference.loss].has_reference:
        what = "the reference model's log-probabilities are"
    elif config.task.name == "distillation" and distillation is not None and distillation.cache:
        what = "the teacher's probabilities (`task.distillation.cache`) are"
    else:
        return
    for key, source in row_sources(config):
        if getattr(source, "stream", None) is not None:
            yield Problem(f"{key}.stream", f"{what} computed before the first step. Remove `stream`.")


_PAIR_LOSSES: dict[str, Table[PairLossEntry]] = {"embedding": EMBEDDING_LOSSES, "reranking": RERANKING_LOSSES}
"""The losses of each task on pairs of texts; both sections have a key `loss`."""


def pair_format_fits_the_loss(config: RunConfig) -> Iterator[Problem]:
    """Losses of scored pairs read rows with scores; all others read rows with a positive."""
    task = config.task.name
    if task not in _PAIR_LOSSES:
        return
    losses, loss = _PAIR_LOSSES[task], getattr(config.task, task).loss
    reads_scores = losses[loss].scores is not None
    for key, source in row_sources(config):
        if source.format == "scored_pairs" and not reads_scores:
            scored = _written(task, [entry.name for entry in losses if entry.scores is not None])
            instead = f"Write {scored}, or another format."
            yield Problem(f"{key}.format", f"`task.{task}.loss: {loss}` reads no scores. {instead}")
        if source.format in ("pairs", "retrieval") and reads_scores:
            message = f"`task.{task}.loss: {loss}` needs a score for each pair. Write `scored_pairs`, or another loss."
            yield Problem(f"{key}.format", message)


def _written(section: str, losses: Sequence[str]) -> str:
    return format_list([f"task.{section}.loss: {losses[0]}", *losses[1:]], last="or")


def embedding_keys_fit(config: RunConfig) -> Iterator[Problem]:
    """Each size is written once; losses of scored pairs compare cosines, and others may need several rows."""
    section = config.task.embedding
    if len(set(section.matryoshka_dims)) < len(section.matryoshka_dims):
        yield Problem("task.embedding.matryoshka_dims", "a size is listed twice. Write each size once.")
    loss = EMBEDDING_LOSSES[section.loss]
    if config.task.name != "embedding":
        return
    if loss.scores is not None and not section.normalize:
        message = f"`loss: {section.loss}` compares cosines. Remove it, or write `true`."
        yield Problem("task.embedding.normalize", message)
    if loss.compares_rows and config.train.global_batch_size < 2:
        message = "the loss compares the rows of a step, but a step has only one. Write at least 2."
        yield Problem("train.global_batch_size", message)


def texts_are_read_without_virtual_tokens(config: RunConfig) -> Iterator[Problem]:
    """Embeddings of texts do not use learned prompts, which sentence-transformers does not load."""
    if config.task.name not in _PAIR_LOSSES:
        return
    if config.model.trains_prompt:
        message = f"`task.name: {config.task.name}` does not support virtual tokens. Use `model.lora`."
        yield Problem("model.peft.type", message)


RULES = (
    samples_fit_the_task,
    sections_of_tasks_fit,
    class_weights_fit_labels,
    preference_loss_fits,
    precomputed_needs_stored_rows,
    pair_format_fits_the_loss,
    embedding_keys_fit,
    texts_are_read_without_virtual_tokens,
)
