"""Keys that have an effect only for some tasks, or only for some kinds of sources."""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.paths import is_url
from finetune.config.rules.sources import is_share, places
from finetune.config.rules.task import ANSWERING, CLASSIFYING, CONVERSING, WITHOUT_TOKENS
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
_PLACES = ("path", "name")
_WITH_IMAGES = ("image_classification", "vision_language_sft")
_SHARED_KEYS = tuple(name for name in SourceSection.model_fields if name not in _PLACES)
_MIXED_KEYS = tuple(name for name in TrainedSourceSection.model_fields if name not in _PLACES)


@dataclass(frozen=True)
class Effect:
    """A key, when it does something, and what to write so that it does."""

    key: str
    has_effect: Callable[[RunConfig], bool]
    needs: str


def source_effects(config: RunConfig) -> Iterator[Effect]:
    """Yield the keys of sources that may do nothing."""
    if config.data.train.mix:
        for name in _MIXED_KEYS:
            yield Effect(f"data.train.{name}", _never, "every source of `data.train.mix` has its own")
    for key, source in places(config):
        if is_share(source):
            for name in _SHARED_KEYS:
                yield Effect(f"{key}.{name}", _never, "the rows are those of `data.train`")
            continue
        for name in _HUB_KEYS:
            needs = f"rows at a `path` have no {name}, only a hub dataset has one"
            yield Effect(f"{key}.{name}", partial(_is_hub_dataset, source=source), needs)
        needs = "only a folder or a glob on this machine can lead elsewhere through a link"
        yield Effect(f"{key}.follow_links", partial(_may_meet_links, source=source), needs)
        yield Effect(f"{key}.image_root", _reads_images, f"only {' and '.join(_WITH_IMAGES)} read images")
    needs = "equal rows are never on both sides of `hash_fraction`"
    yield Effect("data.validation.exclude_from_train", _can_share_rows, needs)


def _never(config: RunConfig) -> bool:
    return False


def _is_hub_dataset(config: RunConfig, *, source: SourceSection) -> bool:
    return source.path is None


def _reads_images(config: RunConfig) -> bool:
    return config.task.name in _WITH_IMAGES


def _may_meet_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Tell whether a folder, a glob, or rows that name images can lead elsewhere through a link."""
    path = source.path
    if _reads_images(config):
        return True
    if path is None or is_url(path):
        return False
    return glob.has_magic(path) or Path(path).is_dir()


def _can_share_rows(config: RunConfig) -> bool:
    return config.data.validation is None or config.data.validation.hash_fraction is None


_OF_COUNTS = ("max_truncated_rows", "max_dropped_rows", "max_lost_targets", "max_unknown_tokens")
_OF_TOKENS = (
    "max_length",
    "over_length",
    "truncate_side",
    "chat_template",
    "system_prompt",
    "train_on",
    "allow_special_tokens",
)
_DPO = ("sigmoid", "robust", "cpo")
_EMBEDDED = (
    *("sft", "pretrain", "seq2seq", "masked_lm", "distillation"),
    *("text_classification", "token_classification"),
)
_SMOOTHED = ("sft", "pretrain", "seq2seq", "masked_lm", "vision_language_sft", *CLASSIFYING)
_NORMALISED = ("sft", "pretrain", "seq2seq", "masked_lm", "vision_language_sft")


def task_effects() -> Iterator[Effect]:
    """Yield the keys that some tasks do not read."""
    sections = (
        ("classification", ClassificationSection, CLASSIFYING),
        ("preference", PreferenceSection, ("preference",)),
        ("reward", RewardSection, ("reward",)),
        ("seq2seq", Seq2SeqSection, ("seq2seq",)),
        ("masked_lm", MaskedLmSection, ("masked_lm",)),
    )
    for name, section, tasks in sections:
        for key in section.model_fields:
            yield Effect(f"task.{name}.{key}", partial(_is, names=tasks), _only(tasks))
    yield Effect("task.distillation", partial(_is, names=("distillation",)), _only(("distillation",)))
    yield Effect("task.distillation.jsd_beta", _mixes, "only `divergence: jsd` mixes both")
    yield Effect("task.classification.kind", _is_of_text, "words and images have exactly one class")
    yield Effect("task.classification.class_weights", _has_classes, "a number is no class")
    yield Effect("task.label_smoothing", _is_smoothed, "only a cross-entropy over classes or tokens is smoothed")
    yield Effect("task.z_loss", partial(_is, names=_NORMALISED), "only a cross-entropy over tokens has it")
    yield Effect("train.loss_kernel", partial(_is, names=_NORMALISED), "only a cross-entropy over tokens has a choice")
    for key, losses in _OF_LOSSES.items():
        needs = f"only {' and '.join(f'`loss: {loss}`' for loss in losses)} read it"
        yield Effect(f"task.preference.{key}", partial(_prefers, losses=losses), needs)
    for key in ImagesSection.model_fields:
        yield Effect(f"data.images.{key}", partial(_is, names=WITHOUT_TOKENS), _only(WITHOUT_TOKENS))
    for key in _OF_TOKENS:
        yield Effect(f"data.{key}", _has_tokens, "images alone have no tokens")
    for key in ("data.no_target", "data.batching.length_window_steps", *(f"data.audit.{each}" for each in _OF_COUNTS)):
        yield Effect(key, _has_tokens, "every image is one target, whatever its size")
    yield Effect("model.tokenizer", _has_tokens, "images alone have no tokens")
    yield Effect("model.new_tokens", _has_tokens, "images alone have no tokens")
    yield Effect("train.embedding_noise", partial(_is, names=_EMBEDDED), _only(_EMBEDDED))
    yield Effect("model.image_processor", partial(_is, names=WITHOUT_TOKENS), _only(WITHOUT_TOKENS))
    for key in ("chat_template", "system_prompt"):
        yield Effect(f"data.{key}", _has_turns, "this task reads text without turns")
    yield Effect("data.train_on", _chooses_turns, "which turns are learnt is decided by the task")
    yield Effect("evaluate.generate.batch_size", _asks_together, "prompts with images are answered one by one")
    yield Effect("evaluate.generate", _asks, "this task, and `data.train_on: all`, have no prompts to answer")


_OF_LOSSES = {
    "label_smoothing": _DPO,
    "target_margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}


def _only(tasks: tuple[str, ...]) -> str:
    return f"only {' and '.join(f'`task.name: {name}`' for name in tasks)} read{'s' if len(tasks) == 1 else ''} it"


def _is(config: RunConfig, *, names: tuple[str, ...]) -> bool:
    return config.task.name in names


def _is_of_text(config: RunConfig) -> bool:
    return config.task.name not in ("token_classification", "image_classification")


def _mixes(config: RunConfig) -> bool:
    section = config.task.distillation
    return section is None or section.divergence == "jsd"


def _has_classes(config: RunConfig) -> bool:
    return config.task.classification.kind != "regression"


def _is_smoothed(config: RunConfig) -> bool:
    return config.task.name in _SMOOTHED and config.task.classification.kind == "single_label"


def _prefers(config: RunConfig, *, losses: tuple[str, ...]) -> bool:
    return config.task.preference.loss in losses


def _has_tokens(config: RunConfig) -> bool:
    return config.task.name not in WITHOUT_TOKENS


def _has_turns(config: RunConfig) -> bool:
    return config.task.name in CONVERSING


def _chooses_turns(config: RunConfig) -> bool:
    return config.task.name in ("sft", "distillation", "vision_language_sft")


def _asks_together(config: RunConfig) -> bool:
    return config.task.name != "vision_language_sft"


def _asks(config: RunConfig) -> bool:
    return config.task.name in ANSWERING and config.data.train_on != "all"
