"""Keys that have an effect only for some tasks, or only for some kinds of sources."""

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.paths import is_url
from finetune.config.rules.sources import is_split_of_training_rows, source_sections
from finetune.config.run_config import RunConfig
from finetune.config.section import Section
from finetune.config.sections.data import ImagesSection, SourceSection, TrainedSourceSection
from finetune.config.sections.task import (
    ClassificationSection,
    EmbeddingSection,
    MaskedLmSection,
    PreferenceSection,
    PromptsSection,
    RerankingSection,
    RewardSection,
    Seq2SeqSection,
)
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, PairLossEntry, PreferenceLossEntry
from finetune.registry.tasks import TASKS, tasks_where

_HUB_KEYS = ("config", "revision", "split")
_ADDRESS_KEYS = ("path", "name", "source")
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
            place = "at a `path`" if source.source is None else "of a plugin's `source`"
            needs = f"rows {place} have no {name}, only a hub dataset has one"
            yield ConditionalKey(f"{key}.{name}", partial(_is_hub_dataset, source=source), needs)
        needs = "only a local folder or glob can contain links to other places"
        yield ConditionalKey(f"{key}.follow_links", partial(_may_meet_links, source=source), needs)
        yield ConditionalKey(
            f"{key}.image_root", _reads_images, f"only {' and '.join(tasks_where('has_images'))} read images"
        )
    needs = "with `hash_fraction`, equal rows are never in both splits"
    yield ConditionalKey("data.validation.exclude_from_train", _can_share_rows, needs)


def _never(config: RunConfig) -> bool:
    return False


def _is_hub_dataset(config: RunConfig, *, source: SourceSection) -> bool:
    return source.name is not None


def _reads_images(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_images


def _may_meet_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Return whether a folder, a glob, or rows that name images may contain links to other places."""
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
_SECTIONS = ("prompts",)
"""Sections in a section of a task, whose keys are named one by one."""


def conditional_task_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that only some tasks use."""
    yield from _keys_of_task()
    yield from _keys_of_loss()
    yield from _keys_of_input()
    yield _for_tasks("train.embedding_noise", "takes_embedding_noise")
    for key in ("train.router_aux_loss", "report.expert_load"):
        yield _for_tasks(key, "watches_routers")
    needs = "prompts with images are generated one by one"
    yield ConditionalKey("evaluate.generate.batch_size", _generates_in_batches, needs)
    needs = "there are no prompts to generate from with this task or `data.train_on: all`"
    yield ConditionalKey("evaluate.generate", _generates, needs)


def _keys_of_task() -> Iterator[ConditionalKey]:
    sections: dict[str, type[Section]] = {
        "classification": ClassificationSection,
        "preference": PreferenceSection,
        "reward": RewardSection,
        "seq2seq": Seq2SeqSection,
        "masked_lm": MaskedLmSection,
        "embedding": EmbeddingSection,
        "embedding.prompts": PromptsSection,
        "reranking": RerankingSection,
    }
    for name, section in sections.items():
        names = tuple(task.name for task in TASKS if task.section == name.partition(".")[0])
        keys = [key for key in section.model_fields if key not in _SECTIONS]
        yield from (_only(f"task.{name}.{key}", names) for key in keys)
    yield _only("task.distillation", ("distillation",))
    yield ConditionalKey("task.distillation.jsd_beta", _is_jsd, "only `divergence: jsd` has a mixture")
    yield ConditionalKey("task.classification.kind", _is_text_task, "for words and images there is exactly one class")
    yield ConditionalKey("task.classification.class_weights", _has_classes, "a regression has no classes")
    for key in _keys_read_by_some(EMBEDDING_LOSSES):
        names = tuple(loss.name for loss in EMBEDDING_LOSSES if key in loss.reads)
        has_effect = partial(_embedding_loss_is, losses=names)
        yield ConditionalKey(f"task.embedding.{key}", has_effect, _only_losses(names))
    for key in _keys_read_by_some(PREFERENCE_LOSSES):
        names = tuple(loss.name for loss in PREFERENCE_LOSSES if key in loss.reads)
        has_effect = partial(_preference_loss_is, losses=names)
        yield ConditionalKey(f"task.preference.{key}", has_effect, _only_losses(names))


def _keys_read_by_some(losses: Iterable[PreferenceLossEntry | PairLossEntry]) -> list[str]:
    """Return the keys that not all of the losses read, in the order of the first one that does."""
    return list(dict.fromkeys(key for loss in losses for key in sorted(loss.reads)))


def _only_losses(names: tuple[str, ...]) -> str:
    return f"only {' and '.join(f'`loss: {name}`' for name in names)} read{'s' if len(names) == 1 else ''} it"


def _keys_of_loss() -> Iterator[ConditionalKey]:
    needs = "it applies only to a cross-entropy over classes or tokens"
    yield ConditionalKey("task.label_smoothing", _is_smoothed, needs)
    yield ConditionalKey("task.z_loss", _has_cross_entropy, "it applies only to a cross-entropy over tokens")
    needs = "only a cross-entropy over tokens has a choice of kernels"
    yield ConditionalKey("train.loss_kernel", _has_cross_entropy, needs)
    yield _for_tasks("task.loss", "has_token_loss")


def _keys_of_input() -> Iterator[ConditionalKey]:
    of_images = tuple(task.name for task in TASKS if not task.has_tokens)
    of_both = tuple(task.name for task in TASKS if task.reads == "both")
    for key in ImagesSection.model_fields:
        yield _only(f"data.images.{key}", of_both if key in ("min_pixels", "max_pixels") else of_images)
    yield _only("model.image_processor", of_images)
    for key in (*(f"data.{each}" for each in _TOKEN_KEYS), "model.tokenizer", "model.new_tokens"):
        yield ConditionalKey(key, _has_tokens, "images have no tokens")
    for key in (*_KEYS_OF_LENGTHS, *(f"data.audit.{each}" for each in _TOKEN_AUDIT_KEYS)):
        yield ConditionalKey(key, _has_tokens, "every image is one target")
    for key in ("data.chat_template", "data.chat_template_arguments", "data.system_prompt"):
        yield ConditionalKey(key, _has_turns, "this task reads text without turns")
    yield ConditionalKey("data.train_on", _chooses_turns, "the task decides which turns are targets")


def _for_tasks(key: str, fact: str) -> ConditionalKey:
    """Return that only the tasks read the key for which a fact of their entry in the registry holds."""
    return _only(key, tasks_where(fact))


def _only(key: str, tasks: tuple[str, ...]) -> ConditionalKey:
    needs = f"only {' and '.join(f'`task.name: {name}`' for name in tasks)} read{'s' if len(tasks) == 1 else ''} it"
    return ConditionalKey(key, partial(_task_is, names=tasks), needs)


_KEYS_OF_LENGTHS = ("data.no_target", "data.batching.length_window_steps")


def _task_is(config: RunConfig, *, names: tuple[str, ...]) -> bool:
    return config.task.name in names


def _is_text_task(config: RunConfig) -> bool:
    return TASKS[config.task.name].sample not in ("tokens_and_tags", "image")


def _is_jsd(config: RunConfig) -> bool:
    section = config.task.distillation
    return section is None or section.divergence == "jsd"


def _has_classes(config: RunConfig) -> bool:
    return config.task.classification.kind != "regression"


def _has_cross_entropy(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_token_loss and config.task.loss is None


def _is_smoothed(config: RunConfig) -> bool:
    if config.task.loss is not None:
        return False
    return TASKS[config.task.name].smooths_labels and config.task.classification.kind == "single_label"


def _preference_loss_is(config: RunConfig, *, losses: tuple[str, ...]) -> bool:
    return config.task.preference.loss in losses


def _embedding_loss_is(config: RunConfig, *, losses: tuple[str, ...]) -> bool:
    return config.task.embedding.loss in losses


def _has_tokens(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_tokens


def _has_turns(config: RunConfig) -> bool:
    return TASKS[config.task.name].is_chat


def _chooses_turns(config: RunConfig) -> bool:
    return TASKS[config.task.name].chooses_turns


def _generates_in_batches(config: RunConfig) -> bool:
    return TASKS[config.task.name].reads != "both"


def _generates(config: RunConfig) -> bool:
    return TASKS[config.task.name].generates and config.data.train_on != "all"
