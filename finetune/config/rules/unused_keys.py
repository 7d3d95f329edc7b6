"""Keys that have no effect given the other keys, the task or the sources of a job, and keys that exclude each other."""

import glob
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetune.config.formatting import format_list
from finetune.config.paths import is_path, is_url
from finetune.config.rules.model import adapter_of, trained_dtypes
from finetune.config.rules.sources import SPLIT_KEYS, is_split_of_training_rows, source_sections
from finetune.config.run_config import RunConfig
from finetune.config.section import Section, has_key, is_written
from finetune.config.sections.data import ImagesSection, SourceSection, TrainedSourceSection
from finetune.config.sections.task import TaskSection
from finetune.errors import Problem
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES
from finetune.registry.observers import TRACKERS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES
from finetune.registry.table import Table
from finetune.registry.tasks import TASKS, TaskEntry, tasks_where

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("train.steps", "train.epochs", "train.tokens"),
    ("train.schedule.warmup_steps", "train.schedule.warmup_fraction"),
    ("model.name", "model.from_config"),
    ("model.lora", "model.peft", "model.adapter"),
    ("model.freeze", "model.train_only"),
    ("model.tokenizer.name", "model.tokenizer.train"),
    ("model.image_processor.size", "data.images.size"),
    ("data.images.crop_scale", "data.images.crop_padding"),
    ("data.train.mix", "data.train.path", "data.train.name"),
)
"""Keys that say the same, so that at most one of them is written."""


def keys_are_written_once(config: RunConfig) -> Iterator[Problem]:
    """Of keys that say the same, one is written; each source of rows has one origin."""
    origins = ("path", "name", "source", *SPLIT_KEYS)
    sources = [
        tuple(f"{key}.{name}" for name in origins if name in type(source).model_fields)
        for key, source in source_sections(config)
    ]
    for keys in (*EXCLUSIVE, *sources):
        try:
            first, *others = [key for key in keys if is_written(config, key)] or [""]
        except AttributeError:  # a draft: one of the sections is invalid
            continue
        yield from (Problem(key, f"`{first}` is written, too. Keep only one of them.") for key in others)


Condition = Callable[[RunConfig], bool]


@dataclass(frozen=True)
class ConditionalKey:
    """A key, the condition under which it has an effect, and the reason to print if it has none."""

    key: str
    has_effect: Condition
    needs: str


def no_unused_keys(config: RunConfig) -> Iterator[Problem]:
    """Every key that the job sets has an effect."""
    for effect in _conditional_keys(config):
        try:
            is_unused = is_written(config, effect.key) and not effect.has_effect(config)
        except AttributeError:  # a draft: one of the keys that decide is invalid
            continue
        if is_unused:
            yield Problem(effect.key, f"it has no effect here: {effect.needs}. Remove it.")


def unused_keys(config: RunConfig) -> frozenset[str]:
    """Return the keys without effect in this config, whether they are set or not."""
    return frozenset(
        effect.key
        for effect in _conditional_keys(config)
        if has_key(config, effect.key) and not effect.has_effect(config)
    )


def _conditional_keys(config: RunConfig) -> Iterator[ConditionalKey]:
    yield from conditional_keys()
    yield from conditional_task_keys()
    yield from conditional_source_keys(config)


def conditional_source_keys(config: RunConfig) -> Iterator[ConditionalKey]:
    """Yield the keys of sources that may have no effect."""
    addresses = ("path", "name", "source")
    if config.data.train.mix:
        for name in TrainedSourceSection.model_fields.keys() - {*addresses}:
            yield ConditionalKey(f"data.train.{name}", _never, "every source of `data.train.mix` has its own")
    for key, source in source_sections(config):
        if is_split_of_training_rows(source):
            for name in SourceSection.model_fields.keys() - {*addresses}:
                yield ConditionalKey(f"{key}.{name}", _never, "the rows come from `data.train`")
            continue
        for name in ("config", "revision", "split"):
            # in a draft, reading an invalid name raises AttributeError
            is_from_hub = partial(lambda source, _: source.name is not None, source)
            yield ConditionalKey(f"{key}.{name}", is_from_hub, f"only a hub dataset has a {name}")
        needs = "only a local folder or glob can contain links to other folders"
        yield ConditionalKey(f"{key}.follow_links", partial(_may_contain_links, source=source), needs)
        needs = f"only {format_list(tasks_where('has_images'))} read images"
        yield ConditionalKey(f"{key}.image_root", lambda config: _task(config).has_images, needs)
    yield ConditionalKey(
        "data.validation.exclude_from_train",
        lambda config: config.data.validation is None or config.data.validation.hash_fraction is None,
        "with `hash_fraction`, equal rows are never in both splits",
    )


def _never(config: RunConfig) -> bool:
    return False


def _may_contain_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Return whether a folder, a glob, or rows that name images may contain links to other folders."""
    path = source.path
    if _task(config).has_images:
        return True
    return path is not None and not is_url(path) and (glob.has_magic(path) or Path(path).is_dir())


def conditional_task_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that only some tasks or losses use; plugins may add more of both."""
    sections = dict(_sections_in(TaskSection))
    for name, section in sections.items():
        names = [task.name for task in TASKS if task.section == name.partition(".")[0]]
        yield from (
            _only(f"task.{name}.{key}", names) for key in section.model_fields if f"{name}.{key}" not in sections
        )
    yield _only("task.distillation", ["distillation"])
    losses: dict[str, Table[Any]] = {"embedding": EMBEDDING_LOSSES, "preference": PREFERENCE_LOSSES}
    for task_name, table in losses.items():
        for key in dict.fromkeys(key for loss in table for key in sorted(loss.reads)):
            names = [loss.name for loss in table if key in loss.reads]
            is_read = partial(lambda task, names, config: getattr(config.task, task).loss in names, task_name, names)
            yield ConditionalKey(f"task.{task_name}.{key}", is_read, f"it is for `loss: {', '.join(names)}`")
    of_images = [task.name for task in TASKS if not task.has_tokens]
    of_both = [task.name for task in TASKS if task.reads == "both"]
    for key in ImagesSection.model_fields:
        yield _only(f"data.images.{key}", of_both if key in ("min_pixels", "max_pixels") else of_images)
    yield _only("model.image_processor", of_images)
    yield _only("task.loss", tasks_where("has_token_loss"))
    yield _only("train.embedding_noise", tasks_where("takes_embedding_noise"))
    yield _only("train.router_aux_loss", tasks_where("watches_routers"))
    yield _only("report.expert_load", tasks_where("watches_routers"))
    yield from _rows(_OF_TASKS)


def _sections_in(section: type[Section], *, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections that are always there, at any depth, by dotted name."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield f"{prefix}{name}", field.annotation
            yield from _sections_in(field.annotation, prefix=f"{prefix}{name}.")


def _only(key: str, tasks: Iterable[str]) -> ConditionalKey:
    names = tuple(tasks)
    return ConditionalKey(key, lambda config: config.task.name in names, f"it is for `task.name: {', '.join(names)}`")


Row = tuple[str, Condition, str]
"""Keys, separated by blanks, the condition under which they have an effect, and the reason if they have none."""


def _rows(table: Iterable[Row]) -> Iterator[ConditionalKey]:
    for keys, has_effect, needs in table:
        yield from (ConditionalKey(key, has_effect, needs) for key in keys.split())


def _task(config: RunConfig) -> TaskEntry:
    return TASKS[config.task.name]


def _has_tokens(config: RunConfig) -> bool:
    return _task(config).has_tokens


def _has_cross_entropy(config: RunConfig) -> bool:
    return _task(config).has_token_loss and config.task.loss is None


def _smooths_labels(config: RunConfig) -> bool:
    is_of_classes = _task(config).smooths_labels and config.task.classification.kind == "single_label"
    return is_of_classes and config.task.loss is None


def _has_teacher(config: RunConfig) -> bool:
    return config.task.distillation is None or config.task.distillation.cross_entropy_weight < 1


_OF_TASKS: tuple[Row, ...] = (
    ("data.max_length data.over_length data.truncate_side data.train_on", _has_tokens, "images have no tokens"),
    ("data.chat_template data.chat_template_arguments data.system_prompt", _has_tokens, "images have no tokens"),
    ("data.allow_special_tokens model.tokenizer model.new_tokens", _has_tokens, "images have no tokens"),
    ("data.no_target data.batching.length_window_steps", _has_tokens, "every image is one target"),
    ("data.audit.max_truncated_rows data.audit.max_dropped_rows", _has_tokens, "every image is one target"),
    ("data.audit.max_lost_targets data.audit.max_unknown_tokens", _has_tokens, "every image is one target"),
    (
        "data.chat_template data.chat_template_arguments data.system_prompt",
        lambda config: _task(config).is_chat,
        "this task reads text without turns",
    ),
    ("data.train_on", lambda config: _task(config).chooses_turns, "the task decides which turns are targets"),
    (
        "task.distillation.jsd_beta",
        lambda config: config.task.distillation is None or config.task.distillation.divergence == "jsd",
        "only `divergence: jsd` has a mixture",
    ),
    (
        "task.distillation.divergence task.distillation.jsd_beta task.distillation.temperature "
        "task.distillation.top_k task.distillation.cache",
        _has_teacher,
        "with `cross_entropy_weight: 1` the task is `sft`",
    ),
    (
        "task.classification.kind",
        lambda config: _task(config).sample not in ("tokens_and_tags", "image"),
        "for words and images there is exactly one class",
    ),
    (
        "task.classification.class_weights",
        lambda config: config.task.classification.kind != "regression",
        "a regression has no classes",
    ),
    ("task.label_smoothing", _smooths_labels, "it applies only to a cross-entropy over classes or tokens"),
    ("task.z_loss", _has_cross_entropy, "it applies only to a cross-entropy over tokens"),
    ("train.loss_kernel", _has_cross_entropy, "only a cross-entropy over tokens has a choice of kernels"),
    (
        "evaluate.generate.batch_size",
        lambda config: _task(config).reads != "both",
        "prompts with images are generated one by one",
    ),
    (
        "evaluate.generate",
        lambda config: _task(config).generates and config.data.train_on != "all",
        "there are no prompts to generate from with this task or `data.train_on: all`",
    ),
)


def conditional_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that depend on others than the task and the sources; plugins may add optimizers and trackers."""
    for key in ("momentum", "betas", "eps", "state_dtype"):
        names = format_list(entry.name for entry in OPTIMIZERS if key in entry.reads)
        yield ConditionalKey(f"train.optimizer.{key}", partial(_reads, key=key), f"it is for {names}")
    for key in ("run_name", "entity", "group", "tags"):
        trackers = {entry.name for entry in TRACKERS if key in entry.arguments}
        is_read = partial(lambda trackers, config: not trackers.isdisjoint(config.report.trackers), trackers)
        yield ConditionalKey(f"report.{key}", is_read, f"it is for {format_list(sorted(trackers))}")
    yield from _rows(_OF_OTHERS)


def _reads(config: RunConfig, *, key: str) -> bool:
    return key in OPTIMIZERS[config.train.optimizer.name].reads


def _updates_in_one_kernel(config: RunConfig) -> bool:
    section = config.train.optimizer
    is_plain = {section.state_dtype or dtype for dtype in trained_dtypes(config)} == trained_dtypes(config)
    is_low_bit = _reads(config, key="state_dtype") and (section.stochastic_rounding or not is_plain)
    return _reads(config, key="fused") and not is_low_bit


def _is_from_hub(config: RunConfig) -> bool:
    return config.model.name is not None and not is_path(config.model.name)


def _downloads(config: RunConfig) -> bool:
    tokenizer = config.model.tokenizer.name if config.model.tokenizer else None
    return _is_from_hub(config) or (tokenizer is not None and not is_path(tokenizer))


def _runs_model_code(config: RunConfig) -> bool:
    return config.model.from_config is None


def _is_4_bit(config: RunConfig) -> bool:
    section = config.model.quantization
    return section is not None and (section.method, section.bits) == ("bitsandbytes", 4)


def _batches_by(*names: str) -> Condition:
    return lambda config: config.data.batching.by in names


_OF_OTHERS: tuple[Row, ...] = (
    ("train.optimizer.fused", _updates_in_one_kernel, "only AdamW has a fused kernel, without stochastic rounding"),
    (
        "train.optimizer.stochastic_rounding",
        lambda config: trained_dtypes(config) == {"bfloat16"} and _reads(config, key="stochastic_rounding"),
        "it applies to `adamw` on weights trained in bfloat16 (`model.dtype`)",
    ),
    ("train.optimizer.lora_plus_ratio", lambda config: config.model.lora is not None, "only `model.lora` has A and B"),
    (
        "train.schedule.decay_fraction",
        lambda config: SCHEDULES[config.train.schedule.name].has_decay_phase,
        "only `name: warmup_stable_decay` has a separate decay phase",
    ),
    (
        "train.schedule.final_fraction",
        lambda config: SCHEDULES[config.train.schedule.name].decays,
        "a constant rate never decays",
    ),
    ("train.nonfinite.max_skips", lambda config: config.train.nonfinite.action == "skip", "it needs `action: skip`"),
    ("train.fp8", lambda config: config.train.precision == "fp8", "it needs `train.precision: fp8`"),
    ("data.truncate_side", lambda config: config.data.over_length == "truncate", "it needs `over_length: truncate`"),
    (
        "data.persistent_workers data.prefetch_factor",
        lambda config: config.data.num_workers != 0,
        "it needs `data.num_workers` above 0, or `auto`",
    ),
    ("data.batching.tokens", _batches_by("packs", "tokens"), "only `by: packs` and `by: tokens` have a budget"),
    ("data.batching.padding_free", _batches_by("samples", "tokens"), "packs are never padded"),
    ("data.batching.length_window_steps", _batches_by("samples"), "only `by: samples` sorts by length"),
    (
        "data.train.until",
        lambda config: any(source.weight is not None for source in config.data.train.mix),
        "only `data.train.mix` with weights has no fixed length",
    ),
    ("model.config model.rope_scaling", _runs_model_code, "that of a new model is in `model.from_config.values`"),
    ("model.trust_remote_code", _runs_model_code, "a model built from its config runs no remote code"),
    ("model.revision", _is_from_hub, "only a hub model has revisions"),
    ("model.cache_folder", _downloads, "nothing is downloaded from the hub"),
    (
        "model.train_only model.freeze",
        lambda config: adapter_of(config) is None,
        "with adapters all of the model's own weights are frozen",
    ),
    ("model.quantization.kind model.quantization.double", _is_4_bit, "it is for bitsandbytes with 4 bits"),
    (
        "export.merge",
        lambda config: adapter_of(config) is not None and not config.model.trains_prompt,
        "there are no adapters that can be merged into the base",
    ),
    ("export.private", lambda config: config.export.push_to_hub is not None, "it needs `export.push_to_hub`"),
    ("run.local_folder", lambda config: is_url(config.run.folder), "only a run at a URL has one"),
    ("checkpoint.allow_changes", lambda config: config.checkpoint.resume != "never", "`resume: never` resumes nothing"),
    (
        "report.expert_load",
        lambda config: config.train.router_aux_loss is None,
        "`train.router_aux_loss` logs it already",
    ),
    ("report.prometheus_address", lambda config: config.report.prometheus is not None, "it needs `report.prometheus`"),
    ("report.project", lambda config: bool(config.report.trackers), "it needs `report.trackers`"),
)
