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
    "embedding": ("pairs", "retrieval", "scored_pairs"),
    "reranking": ("retrieval", "pairs", "scored_pairs"),
}
"""The formats that each task reads."""

CHAT_TASKS: tuple[TaskName, ...] = ("sft", "preference", "reward", "distillation", "vision_language_sft")
"""Tasks whose rows are rendered by a chat template."""

TURN_TASKS: tuple[TaskName, ...] = ("sft", "distillation", "vision_language_sft")
"""Tasks whose targets are turns that `data.train_on` chooses."""

GENERATION_TASKS: tuple[TaskName, ...] = ("sft", "distillation", "vision_language_sft", "seq2seq")
"""Tasks that can generate answers."""

CLASSIFICATION_TASKS: tuple[TaskName, ...] = ("text_classification", "token_classification", "image_classification")

PACKED_TASKS: tuple[TaskName, ...] = ("sft", "pretrain")
"""Tasks of which a position of the data order may be a pack."""

PADDING_FREE_TASKS: tuple[TaskName, ...] = (
    *PACKED_TASKS,
    *("distillation", "masked_lm", "preference", "reward", "text_classification", "token_classification"),
)
"""Tasks whose samples may stand end to end in a forward pass."""

PADDED_TASKS: tuple[TaskName, ...] = tuple(name for name in FORMATS_OF_TASK if name not in PADDING_FREE_TASKS)
"""Tasks whose samples are always padded."""

WHOLE_ROW_TASKS: tuple[TaskName, ...] = (
    *("seq2seq", "text_classification", "preference", "reward"),
    *("embedding", "reranking"),
)
"""Tasks that need whole rows: windows of a row would each have its label, or no answer to compare."""

TASKS_OF_SEVERAL_TEXTS: tuple[TaskName, ...] = ("preference", "reward", "embedding", "reranking")
"""Tasks whose samples have several texts, which are padded to the same length."""

TASKS_WITHOUT_TOKENS: tuple[TaskName, ...] = ("image_classification",)


def max_length_is_written(config: RunConfig) -> Iterator[Problem]:
    """`data.max_length` is an explicit choice for every task that reads tokens."""
    if config.data.max_length is None and config.task.name not in TASKS_WITHOUT_TOKENS:
        message = (
            "the key is missing: the maximum length of a sample in tokens; `data.over_length` handles longer rows."
        )
        yield Problem("data.max_length", message)


def distillation_has_a_teacher(config: RunConfig) -> Iterator[Problem]:
    """Distillation has a teacher; only its top-k probabilities are cached."""
    section = config.task.distillation
    if config.task.name == "distillation" and section is None:
        yield Problem("task.distillation", "there is no teacher. Write `distillation: {teacher: NAME OR FOLDER}`.")
    if section is not None and section.cache and section.top_k is None:
        message = (
            "caching the whole vocabulary for every target would fill the disk. Set `task.distillation.top_k: 64`."
        )
        yield Problem("task.distillation.cache", message)


def class_weights_fit_labels(config: RunConfig) -> Iterator[Problem]:
    """Each class has one name and one weight."""
    section = config.task.classification
    if len(set(section.labels)) < len(section.labels):
        yield Problem("task.classification.labels", "a class is listed twice. List each class once.")
    if len(section.labels) == 1 and section.kind == "single_label" and config.task.name in CLASSIFICATION_TASKS:
        message = "a single class cannot be classified. List at least two, or use `kind: multi_label`."
        yield Problem("task.classification.labels", message)
    weights = section.class_weights
    if weights is None or weights == "balanced":
        return
    if not section.labels:
        message = "the order of the weights is undefined. Write `task.classification.labels` in the same order."
        yield Problem("task.classification.class_weights", message)
    elif len(weights) != len(section.labels):
        message = f"there are {len(weights)} weights for {len(section.labels)} labels. Write one weight per label."
        yield Problem("task.classification.class_weights", message)


def task_allows_packing(config: RunConfig) -> Iterator[Problem]:
    """Some tasks pad their samples, and only causal language models train on packs."""
    batching, task = config.data.batching, config.task.name
    if batching.padding_free is True and task in PADDED_TASKS:
        message = f"`task.name: {task}` pads its samples. Remove the key: they are sorted by length within each step."
        yield Problem("data.batching.padding_free", message)
    if batching.by == "packs" and task not in PACKED_TASKS:
        message = f"`task.name: {task}` is not trained on packs. Write `by: samples`"
        is_free = task in PADDING_FREE_TASKS
        yield Problem("data.batching.by", f"{message}; `padding_free` avoids padding." if is_free else f"{message}.")
    if batching.by == "tokens" and task in TASKS_WITHOUT_TOKENS:
        yield Problem("data.batching.by", f"`task.name: {task}` has no tokens. Write `by: samples`.")


def task_allows_split_rows(config: RunConfig) -> Iterator[Problem]:
    """Tasks that need whole rows do not split them."""
    if config.data.over_length == "split" and config.task.name in WHOLE_ROW_TASKS:
        message = f"`task.name: {config.task.name}` needs whole rows. Write `truncate` or `drop`."
        yield Problem("data.over_length", message)


def task_allows_cut_rows(config: RunConfig) -> Iterator[Problem]:
    """A row with images is not truncated: it could cut through the tokens of an image."""
    if config.task.name == "vision_language_sft" and config.data.over_length in ("truncate", "split"):
        message = "truncation could cut through an image. Write `drop`, or a larger `data.max_length`."
        yield Problem("data.over_length", message)


def source_and_target_fit_the_batch(config: RunConfig) -> Iterator[Problem]:
    """A batch by tokens can hold a source and its target."""
    tokens, source = config.data.batching.tokens, config.data.max_length
    if config.task.name != "seq2seq" or config.data.batching.by != "tokens" or source is None:
        return
    longest = source + (config.task.seq2seq.max_target_length or source)
    if (tokens or 0) < longest:
        message = f"the longest source and the longest target have {longest} tokens together. Write at least that many."
        yield Problem("data.batching.tokens", message)


def masked_lm_masks_tokens(config: RunConfig) -> Iterator[Problem]:
    """Of the predicted tokens, some are masked."""
    section = config.task.masked_lm
    if section.random_fraction + section.kept_fraction > 1:
        message = "together with `kept_fraction` it exceeds 1."
        yield Problem("task.masked_lm.random_fraction", f"{message} Reduce one of them.")


def vision_language_has_a_processor(config: RunConfig) -> Iterator[Problem]:
    """A processor of images and text comes with a model."""
    tokenizer = config.model.tokenizer
    if config.task.name == "vision_language_sft" and tokenizer is not None and tokenizer.train is not None:
        message = "a tokenizer alone cannot process images. Write `name`: a model, or a folder with its processor."
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
"""Losses that need a reference model."""


def robust_loss_has_label_smoothing(config: RunConfig) -> Iterator[Problem]:
    """The robust loss needs the fraction of wrong pairs."""
    section = config.task.preference
    if config.task.name == "preference" and section.loss == "robust" and section.label_smoothing == 0:
        message = "`robust` without it is `sigmoid`. Write the fraction of wrong pairs, such as `label_smoothing: 0.1`."
        yield Problem("task.preference.label_smoothing", message)


def judged_format_needs_kto(config: RunConfig) -> Iterator[Problem]:
    """Only KTO trains on answers that are judged one by one."""
    if config.task.name != "preference" or config.task.preference.loss == "kto":
        return
    for key, source in row_sources(config):
        if source.format == "judged":
            message = "only `task.preference.loss: kto` trains on single answers. Write that, or `format: preference`."
            yield Problem(f"{key}.format", message)


def precomputed_needs_stored_rows(config: RunConfig) -> Iterator[Problem]:
    """What is precomputed for every sample before the first step cannot use a stream."""
    distillation = config.task.distillation
    if config.task.name == "preference" and config.task.preference.loss in REFERENCE_LOSSES:
        what = "the reference model's log-probabilities are"
    elif config.task.name == "distillation" and distillation is not None and distillation.cache:
        what = "the teacher's probabilities (`task.distillation.cache`) are"
    else:
        return
    for key, source in row_sources(config):
        if getattr(source, "stream", None) is not None:
            yield Problem(f"{key}.stream", f"{what} computed before the first step. Remove `stream`.")


PREFERENCE_RULES = (robust_loss_has_label_smoothing, judged_format_needs_kto, precomputed_needs_stored_rows)


_SCORED_LOSSES = ("cosent", "cosine_mse", "bce", "mse")
"""Losses of pairs with a score."""

_SCORED_LOSSES_OF_TASK: Mapping[TaskName, str] = {
    "embedding": "`task.embedding.loss: cosent` or `cosine_mse`",
    "reranking": "`task.reranking.loss: bce` or `mse`",
}


def pair_format_fits_the_loss(config: RunConfig) -> Iterator[Problem]:
    """Losses of scored pairs have rows with scores, all others rows with a positive."""
    task = config.task.name
    if task not in _SCORED_LOSSES_OF_TASK:
        return
    loss = config.task.embedding.loss if task == "embedding" else config.task.reranking.loss
    for key, source in row_sources(config):
        if source.format == "scored_pairs" and loss not in _SCORED_LOSSES:
            instead = f"Write {_SCORED_LOSSES_OF_TASK[task]}, or another format."
            yield Problem(f"{key}.format", f"`task.{task}.loss: {loss}` reads no scores. {instead}")
        if source.format in ("pairs", "retrieval") and loss in _SCORED_LOSSES:
            message = f"`task.{task}.loss: {loss}` needs a score for each pair. Write `scored_pairs`, or another loss."
            yield Problem(f"{key}.format", message)


def matryoshka_dims_differ(config: RunConfig) -> Iterator[Problem]:
    """Each size is written once."""
    dims = config.task.embedding.matryoshka_dims
    if len(set(dims)) < len(dims):
        yield Problem("task.embedding.matryoshka_dims", "a size is listed twice. Write each size once.")


def scored_pairs_are_compared_by_cosine(config: RunConfig) -> Iterator[Problem]:
    """Losses of scored pairs are those of cosines."""
    section = config.task.embedding
    if config.task.name == "embedding" and section.loss != "infonce" and not section.normalize:
        yield Problem(
            "task.embedding.normalize", f"`loss: {section.loss}` compares cosines. Remove it, or write `true`."
        )


def texts_are_read_without_virtual_tokens(config: RunConfig) -> Iterator[Problem]:
    """Vectors of texts are not taken from learned prompts, which sentence-transformers does not load."""
    if config.task.name not in ("embedding", "reranking"):
        return
    for name in ("prompt_tuning", "prefix_tuning"):
        if getattr(config.model, name) is not None:
            message = f"`task.name: {config.task.name}` has no place for virtual tokens. Use `model.lora`."
            yield Problem(f"model.{name}", message)


def step_has_rows_to_compare(config: RunConfig) -> Iterator[Problem]:
    """A loss over the whole global batch has something to compare."""
    if config.task.name != "embedding" or config.task.embedding.loss == "cosine_mse":
        return
    if config.train.global_batch_size < 2:
        message = "the loss compares the rows of a step with each other, and there is one. Write at least 2."
        yield Problem("train.global_batch_size", message)


PAIR_RULES = (
    pair_format_fits_the_loss,
    matryoshka_dims_differ,
    scored_pairs_are_compared_by_cosine,
    texts_are_read_without_virtual_tokens,
    step_has_rows_to_compare,
)
