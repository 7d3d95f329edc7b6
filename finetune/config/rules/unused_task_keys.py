"""Keys that have an effect only for some tasks, or only for some kinds of sources."""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.paths import is_url
from finetune.config.rules.sources import is_split_of_training_rows, source_sections
from finetune.config.rules.task import (
    CHAT_TASKS,
    CLASSIFICATION_TASKS,
    GENERATION_TASKS,
    TASKS_WITHOUT_TOKENS,
    TURN_TASKS,
)
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import ImagesSection, SourceSection, TrainedSourceSection
from finetune.config.sections.task import (
    ClassificationSection,
    MaskedLmSection,
    PreferenceSection,
    RewardSection,
    Seq2SeqSection,
)

_HUB_KEYS = ("config", "revision", "split")
_ADDRESS_KEYS = ("path", "name")
_IMAGE_TASKS = ("image_classification", "vision_language_sft")
_SPLIT_KEYS = tuple(name for name in SourceSection.model_fields if name not in _ADDRESS_KEYS)
_MIXED_KEYS = tuple(name for name in TrainedSourceSection.model_fields if name not in _ADDRESS_KEYS)


@dataclass(frozen=True)
class ConditionalKey:
    """A key, when it has an effect, and what it needs to have one."""

    key: str
    has_effect: Callable[[RunConfig], bool]
    needs: str


def conditional_source_keys(config: RunConfig) -> Iterator[ConditionalKey]:
    """Yield the keys of sources that may have no effect."""
    if config.data.train.mix:
        for name in _MIXED_KEYS:
            yield ConditionalKey(f"data.train.{name}", _never, "every source of `data.train.mix` has its own")
    for key, source in source_sections(config):
        if is_split_of_training_rows(source):
            for name in _SPLIT_KEYS:
                yield ConditionalKey(f"{key}.{name}", _never, "the rows are those of `data.train`")
            continue
        for name in _HUB_KEYS:
            needs = f"rows at a `path` have no {name}, only a hub dataset has one"
            yield ConditionalKey(f"{key}.{name}", partial(_is_hub_dataset, source=source), needs)
        needs = "only a local folder or glob can contain links to other places"
        yield ConditionalKey(f"{key}.follow_links", partial(_may_meet_links, source=source), needs)
        yield ConditionalKey(f"{key}.image_root", _reads_images, f"only {' and '.join(_IMAGE_TASKS)} read images")
    needs = "with `hash_fraction`, equal rows are never in both splits"
    yield ConditionalKey("data.validation.exclude_from_train", _can_share_rows, needs)


def _never(config: RunConfig) -> bool:
    return False


def _is_hub_dataset(config: RunConfig, *, source: SourceSection) -> bool:
    return source.path is None


def _reads_images(config: RunConfig) -> bool:
    return config.task.name in _IMAGE_TASKS


def _may_meet_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Tell whether a folder, a glob, or rows that name images may contain links to other places."""
    path = source.path
    if _reads_images(config):
        return True
    if path is None or is_url(path):
        return False
    return glob.has_magic(path) or Path(path).is_dir()


def _can_share_rows(config: RunConfig) -> bool:
    return config.data.validation is None or config.data.validation.hash_fraction is None


_TOKEN_AUDIT_KEYS = ("max_truncated_rows", "max_dropped_rows", "max_lost_targets", "max_unknown_tokens")
_TOKEN_KEYS = (
    "max_length",
    "over_length",
    "truncate_side",
    "chat_template",
    "chat_template_arguments",
    "system_prompt",
    "train_on",
    "allow_special_tokens",
)
_SMOOTHED_LOSSES = ("sigmoid", "robust", "cpo")
_TASKS_WITH_EMBEDDINGS = (
    *("sft", "pretrain", "seq2seq", "masked_lm", "distillation"),
    *("text_classification", "token_classification"),
)
_TASKS_WITH_ROUTERS = (
    *("sft", "pretrain", "distillation", "preference", "reward", "text_classification", "token_classification"),
)
_SMOOTHED_TASKS = ("sft", "pretrain", "seq2seq", "masked_lm", "vision_language_sft", *CLASSIFICATION_TASKS)
_TOKEN_LOSS_TASKS = ("sft", "pretrain", "seq2seq", "masked_lm", "vision_language_sft")


def conditional_task_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that only some tasks use."""
    yield from _keys_of_task()
    yield from _keys_of_loss()
    yield from _keys_of_input()
    yield _for_tasks("train.embedding_noise", _TASKS_WITH_EMBEDDINGS)
    for key in ("train.router_aux_loss", "report.expert_load"):
        yield _for_tasks(key, _TASKS_WITH_ROUTERS)
    needs = "prompts with images are generated one by one"
    yield ConditionalKey("evaluate.generate.batch_size", _generates_in_batches, needs)
    needs = "there are no prompts to generate from with this task or `data.train_on: all`"
    yield ConditionalKey("evaluate.generate", _generates, needs)


def _keys_of_task() -> Iterator[ConditionalKey]:
    sections = (
        ("classification", ClassificationSection, CLASSIFICATION_TASKS),
        ("preference", PreferenceSection, ("preference",)),
        ("reward", RewardSection, ("reward",)),
        ("seq2seq", Seq2SeqSection, ("seq2seq",)),
        ("masked_lm", MaskedLmSection, ("masked_lm",)),
    )
    for name, section, tasks in sections:
        yield from (_for_tasks(f"task.{name}.{key}", tasks) for key in section.model_fields)
    yield _for_tasks("task.distillation", ("distillation",))
    yield ConditionalKey("task.distillation.jsd_beta", _is_jsd, "only `divergence: jsd` has a mixture")
    yield ConditionalKey("task.classification.kind", _is_text_task, "for words and images there is exactly one class")
    yield ConditionalKey("task.classification.class_weights", _has_classes, "a regression has no classes")
    for key, losses in _KEYS_OF_LOSSES.items():
        needs = f"only {' and '.join(f'`loss: {loss}`' for loss in losses)} read it"
        yield ConditionalKey(f"task.preference.{key}", partial(_preference_loss_is, losses=losses), needs)


def _keys_of_loss() -> Iterator[ConditionalKey]:
    needs = "it applies only to a cross-entropy over classes or tokens"
    yield ConditionalKey("task.label_smoothing", _is_smoothed, needs)
    has_token_loss = partial(_task_is, names=_TOKEN_LOSS_TASKS)
    yield ConditionalKey("task.z_loss", has_token_loss, "it applies only to a cross-entropy over tokens")
    needs = "only a cross-entropy over tokens has a choice of kernels"
    yield ConditionalKey("train.loss_kernel", has_token_loss, needs)


def _keys_of_input() -> Iterator[ConditionalKey]:
    yield from (_for_tasks(f"data.images.{key}", TASKS_WITHOUT_TOKENS) for key in ImagesSection.model_fields)
    yield _for_tasks("model.image_processor", TASKS_WITHOUT_TOKENS)
    for key in (*(f"data.{each}" for each in _TOKEN_KEYS), "model.tokenizer", "model.new_tokens"):
        yield ConditionalKey(key, _has_tokens, "images have no tokens")
    for key in (*_KEYS_OF_LENGTHS, *(f"data.audit.{each}" for each in _TOKEN_AUDIT_KEYS)):
        yield ConditionalKey(key, _has_tokens, "every image is one target")
    for key in ("data.chat_template", "data.chat_template_arguments", "data.system_prompt"):
        yield ConditionalKey(key, _has_turns, "this task reads text without turns")
    yield ConditionalKey("data.train_on", _chooses_turns, "the task decides which turns are targets")


def _for_tasks(key: str, tasks: tuple[str, ...]) -> ConditionalKey:
    needs = f"only {' and '.join(f'`task.name: {name}`' for name in tasks)} read{'s' if len(tasks) == 1 else ''} it"
    return ConditionalKey(key, partial(_task_is, names=tasks), needs)


_KEYS_OF_LENGTHS = ("data.no_target", "data.batching.length_window_steps")
_KEYS_OF_LOSSES = {
    "label_smoothing": _SMOOTHED_LOSSES,
    "target_margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def _task_is(config: RunConfig, *, names: tuple[str, ...]) -> bool:
    return config.task.name in names


def _is_text_task(config: RunConfig) -> bool:
    return config.task.name not in ("token_classification", "image_classification")


def _is_jsd(config: RunConfig) -> bool:
    section = config.task.distillation
    return section is None or section.divergence == "jsd"


def _has_classes(config: RunConfig) -> bool:
    return config.task.classification.kind != "regression"


def _is_smoothed(config: RunConfig) -> bool:
    return config.task.name in _SMOOTHED_TASKS and config.task.classification.kind == "single_label"


def _preference_loss_is(config: RunConfig, *, losses: tuple[str, ...]) -> bool:
    return config.task.preference.loss in losses


def _has_tokens(config: RunConfig) -> bool:
    return config.task.name not in TASKS_WITHOUT_TOKENS


def _has_turns(config: RunConfig) -> bool:
    return config.task.name in CHAT_TASKS


def _chooses_turns(config: RunConfig) -> bool:
    return config.task.name in TURN_TASKS


def _generates_in_batches(config: RunConfig) -> bool:
    return config.task.name != "vision_language_sft"


def _generates(config: RunConfig) -> bool:
    return config.task.name in GENERATION_TASKS and config.data.train_on != "all"
