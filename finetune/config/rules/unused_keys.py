"""Keys that have no effect given the other keys of the job, its task or its sources: setting one is an error."""

import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from finetune.config.formatting import format_list
from finetune.config.paths import is_path, is_url
from finetune.config.rules.model import adapter_of, trained_dtypes
from finetune.config.rules.sources import is_split_of_training_rows, source_sections
from finetune.config.run_config import RunConfig
from finetune.config.section import Section, has_key, is_written
from finetune.config.sections.data import ImagesSection, SourceSection, TrainedSourceSection
from finetune.config.sections.task import TaskSection
from finetune.errors import Problem
from finetune.registry.losses import EMBEDDING_LOSSES, PREFERENCE_LOSSES, PairLossEntry, PreferenceLossEntry
from finetune.registry.observers import TRACKERS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES
from finetune.registry.tasks import TASKS, tasks_where

_HUB_KEYS = ("config", "revision", "split")
_ADDRESS_KEYS = ("path", "name", "source")
_SPLIT_KEYS = tuple(name for name in SourceSection.model_fields if name not in _ADDRESS_KEYS)
_MIXED_KEYS = tuple(name for name in TrainedSourceSection.model_fields if name not in _ADDRESS_KEYS)


@dataclass(frozen=True)
class ConditionalKey:
    """A key, the condition under which it has an effect, and the reason to print if it has none."""

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
                yield ConditionalKey(f"{key}.{name}", _never, "the rows come from `data.train`")
            continue
        for name in _HUB_KEYS:
            origin = "from a `path`" if source.source is None else "of a plugin's `source`"
            needs = f"rows {origin} have no {name}, only a hub dataset has one"
            # in a draft, reading an invalid name raises AttributeError
            yield ConditionalKey(f"{key}.{name}", partial(lambda source, _: source.name is not None, source), needs)
        needs = "only a local folder or glob can contain links to other folders"
        yield ConditionalKey(f"{key}.follow_links", partial(_may_contain_links, source=source), needs)
        yield ConditionalKey(
            f"{key}.image_root", _reads_images, f"only {' and '.join(tasks_where('has_images'))} read images"
        )
    yield ConditionalKey(
        "data.validation.exclude_from_train",
        lambda config: config.data.validation is None or config.data.validation.hash_fraction is None,
        "with `hash_fraction`, equal rows are never in both splits",
    )


def _never(config: RunConfig) -> bool:
    return False


def _reads_images(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_images


def _may_contain_links(config: RunConfig, *, source: SourceSection) -> bool:
    """Return whether a folder, a glob, or rows that name images may contain links to other folders."""
    path = source.path
    if _reads_images(config):
        return True
    return path is not None and not is_url(path) and (glob.has_magic(path) or Path(path).is_dir())


_TOKEN_KEYS = (
    "data.max_length",
    "data.over_length",
    "data.truncate_side",
    "data.chat_template",
    "data.chat_template_arguments",
    "data.system_prompt",
    "data.train_on",
    "data.allow_special_tokens",
    "model.tokenizer",
    "model.new_tokens",
)
_LENGTH_KEYS = (
    "data.no_target",
    "data.batching.length_window_steps",
    "data.audit.max_truncated_rows",
    "data.audit.max_dropped_rows",
    "data.audit.max_lost_targets",
    "data.audit.max_unknown_tokens",
)


def _sections_in(section: type[Section], *, prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield the sections that are always there, at any depth, by dotted name."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield f"{prefix}{name}", field.annotation
            yield from _sections_in(field.annotation, prefix=f"{prefix}{name}.")


def conditional_task_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that only some tasks or losses use; plugins may add more of both."""
    sections = dict(_sections_in(TaskSection))
    for name, section in sections.items():
        names = tuple(task.name for task in TASKS if task.section == name.partition(".")[0])
        keys = [key for key in section.model_fields if f"{name}.{key}" not in sections]
        yield from (_only(f"task.{name}.{key}", names) for key in keys)
    yield _only("task.distillation", ("distillation",))
    of_losses: tuple[tuple[str, Sequence[PreferenceLossEntry | PairLossEntry]], ...] = (
        ("embedding", tuple(EMBEDDING_LOSSES)),
        ("preference", tuple(PREFERENCE_LOSSES)),
    )
    for task_name, losses in of_losses:
        for key in dict.fromkeys(key for loss in losses for key in sorted(loss.reads)):
            names = tuple(loss.name for loss in losses if key in loss.reads)
            others = [f"loss: {loss.name}" for loss in losses if key not in loss.reads]
            needs = f"only {' and '.join(f'`loss: {name}`' for name in names)} read{'s' if len(names) == 1 else ''} it"
            if len(others) == 1 < len(names) - 1:
                needs = f"`{others[0]}` does not read it"
            is_read = partial(lambda task, losses, config: getattr(config.task, task).loss in losses, task_name, names)
            yield ConditionalKey(f"task.{task_name}.{key}", is_read, needs)
    of_images = tuple(task.name for task in TASKS if not task.has_tokens)
    of_both = tuple(task.name for task in TASKS if task.reads == "both")
    for key in ImagesSection.model_fields:
        yield _only(f"data.images.{key}", of_both if key in ("min_pixels", "max_pixels") else of_images)
    yield _only("model.image_processor", of_images)
    for key, fact in (
        ("task.loss", "has_token_loss"),
        ("train.embedding_noise", "takes_embedding_noise"),
        ("train.router_aux_loss", "watches_routers"),
        ("report.expert_load", "watches_routers"),
    ):
        yield _only(key, tasks_where(fact))
    yield from _TASK_KEYS


def _only(key: str, tasks: tuple[str, ...]) -> ConditionalKey:
    needs = f"only {' and '.join(f'`task.name: {name}`' for name in tasks)} read{'s' if len(tasks) == 1 else ''} it"
    return ConditionalKey(key, lambda config: config.task.name in tasks, needs)


def _has_cross_entropy(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_token_loss and config.task.loss is None


def _has_teacher(config: RunConfig) -> bool:
    return config.task.distillation is None or config.task.distillation.cross_entropy_weight < 1


def _has_tokens(config: RunConfig) -> bool:
    return TASKS[config.task.name].has_tokens


_TASK_KEYS: tuple[ConditionalKey, ...] = (
    *(ConditionalKey(key, _has_tokens, "images have no tokens") for key in _TOKEN_KEYS),
    *(ConditionalKey(key, _has_tokens, "every image is one target") for key in _LENGTH_KEYS),
    *(
        ConditionalKey(key, lambda config: TASKS[config.task.name].is_chat, "this task reads text without turns")
        for key in ("data.chat_template", "data.chat_template_arguments", "data.system_prompt")
    ),
    ConditionalKey(
        "data.train_on",
        lambda config: TASKS[config.task.name].chooses_turns,
        "the task decides which turns are targets",
    ),
    ConditionalKey(
        "task.distillation.jsd_beta",
        lambda config: config.task.distillation is None or config.task.distillation.divergence == "jsd",
        "only `divergence: jsd` has a mixture",
    ),
    *(
        ConditionalKey(f"task.distillation.{key}", _has_teacher, "with `cross_entropy_weight: 1` the task is `sft`")
        for key in ("divergence", "jsd_beta", "temperature", "top_k", "cache")
    ),
    ConditionalKey(
        "task.classification.kind",
        lambda config: TASKS[config.task.name].sample not in ("tokens_and_tags", "image"),
        "for words and images there is exactly one class",
    ),
    ConditionalKey(
        "task.classification.class_weights",
        lambda config: config.task.classification.kind != "regression",
        "a regression has no classes",
    ),
    ConditionalKey(
        "task.label_smoothing",
        lambda config: (
            config.task.loss is None
            and TASKS[config.task.name].smooths_labels
            and config.task.classification.kind == "single_label"
        ),
        "it applies only to a cross-entropy over classes or tokens",
    ),
    ConditionalKey("task.z_loss", _has_cross_entropy, "it applies only to a cross-entropy over tokens"),
    ConditionalKey("train.loss_kernel", _has_cross_entropy, "only a cross-entropy over tokens has a choice of kernels"),
    ConditionalKey(
        "evaluate.generate.batch_size",
        lambda config: TASKS[config.task.name].reads != "both",
        "prompts with images are generated one by one",
    ),
    ConditionalKey(
        "evaluate.generate",
        lambda config: TASKS[config.task.name].generates and config.data.train_on != "all",
        "there are no prompts to generate from with this task or `data.train_on: all`",
    ),
)


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
    yield from CONDITIONAL_KEYS
    yield from optimizer_keys()
    yield from tracker_keys()
    yield from conditional_task_keys()
    yield from conditional_source_keys(config)


def optimizer_keys() -> Iterator[ConditionalKey]:
    """Yield the keys that only some optimizers read."""
    wordings = {"momentum": "momentum", "betas": "betas", "eps": "eps", "state_dtype": "a choice of state dtype"}
    for key, text in wordings.items():
        names = tuple(entry.name for entry in OPTIMIZERS if key in entry.reads)
        needs = f"only {format_list(names)} {'has' if len(names) == 1 else 'have'} {text}"
        yield ConditionalKey(f"train.optimizer.{key}", partial(_reads, key=key), needs)


def tracker_keys() -> Iterator[ConditionalKey]:
    """Yield the keys of `report:` that only some trackers read."""
    for key in ("run_name", "entity", "group", "tags"):
        names = tuple(entry.name for entry in TRACKERS if key in entry.arguments)
        needs = f"only {format_list(names)} read it, and `report.trackers` names none of them"
        uses_one = partial(lambda names, config: any(name in config.report.trackers for name in names), names)
        yield ConditionalKey(f"report.{key}", uses_one, needs)


def _reads(config: RunConfig, *, key: str) -> bool:
    return key in OPTIMIZERS[config.train.optimizer.name].reads


def _updates_in_one_kernel(config: RunConfig) -> bool:
    section = config.train.optimizer
    is_plain = {section.state_dtype or dtype for dtype in trained_dtypes(config)} == trained_dtypes(config)
    is_low_bit = _reads(config, key="state_dtype") and (section.stochastic_rounding or not is_plain)
    return _reads(config, key="fused") and not is_low_bit


def _has_workers(config: RunConfig) -> bool:
    return config.data.num_workers != 0


def _is_from_hub(config: RunConfig) -> bool:
    return config.model.name is not None and not is_path(config.model.name)


def _runs_model_code(config: RunConfig) -> bool:
    return config.model.from_config is None


def _trains_own_weights(config: RunConfig) -> bool:
    return adapter_of(config) is None


def _is_4_bit(config: RunConfig) -> bool:
    section = config.model.quantization
    return section is not None and (section.method, section.bits) == ("bitsandbytes", 4)


def _batches_by(config: RunConfig, *, names: tuple[str, ...]) -> bool:
    return config.data.batching.by in names


CONDITIONAL_KEYS: tuple[ConditionalKey, ...] = (
    ConditionalKey(
        "train.optimizer.fused", _updates_in_one_kernel, "only AdamW has a fused kernel, without stochastic rounding"
    ),
    ConditionalKey(
        "train.optimizer.stochastic_rounding",
        lambda config: trained_dtypes(config) == {"bfloat16"} and _reads(config, key="stochastic_rounding"),
        "it applies to `adamw` on weights trained in bfloat16 (`model.dtype`)",
    ),
    ConditionalKey(
        "train.schedule.decay_fraction",
        lambda config: SCHEDULES[config.train.schedule.name].has_decay_phase,
        "only `name: warmup_stable_decay` has a separate decay phase",
    ),
    ConditionalKey(
        "train.schedule.final_fraction",
        lambda config: SCHEDULES[config.train.schedule.name].decays,
        "a constant rate never decays",
    ),
    ConditionalKey(
        "train.nonfinite.max_skips",
        lambda config: config.train.nonfinite.action == "skip",
        "only `action: skip` skips steps",
    ),
    ConditionalKey(
        "data.truncate_side",
        lambda config: config.data.over_length == "truncate",
        "only `over_length: truncate` truncates",
    ),
    ConditionalKey("data.persistent_workers", _has_workers, "it needs `data.num_workers` above 0, or `auto`"),
    ConditionalKey("data.prefetch_factor", _has_workers, "it needs `data.num_workers` above 0, or `auto`"),
    ConditionalKey(
        "data.batching.tokens",
        partial(_batches_by, names=("packs", "tokens")),
        "only `by: packs` and `by: tokens` have a budget",
    ),
    ConditionalKey(
        "data.batching.padding_free",
        partial(_batches_by, names=("samples", "tokens")),
        "packs are never padded",
    ),
    ConditionalKey(
        "data.batching.length_window_steps",
        partial(_batches_by, names=("samples",)),
        "only `by: samples` sorts by length",
    ),
    ConditionalKey(
        "data.train.until",
        lambda config: any(source.weight is not None for source in config.data.train.mix),
        "only `data.train.mix` with weights has no fixed length",
    ),
    ConditionalKey("model.config", _runs_model_code, "the values of a new model are in `model.from_config.values`"),
    ConditionalKey(
        "model.rope_scaling", _runs_model_code, "that of a new model is `rope_scaling` in `model.from_config.values`"
    ),
    ConditionalKey("model.revision", _is_from_hub, "only a hub model has revisions"),
    ConditionalKey("model.trust_remote_code", _runs_model_code, "a model built from its config runs no remote code"),
    ConditionalKey(
        "model.cache_folder",
        lambda config: (
            _is_from_hub(config)
            or (
                config.model.tokenizer is not None
                and config.model.tokenizer.name is not None
                and not is_path(config.model.tokenizer.name)
            )
        ),
        "nothing is downloaded from the hub",
    ),
    ConditionalKey("model.train_only", _trains_own_weights, "with adapters all of the model's own weights are frozen"),
    ConditionalKey("model.freeze", _trains_own_weights, "with adapters all of the model's own weights are frozen"),
    ConditionalKey(
        "train.optimizer.lora_plus_ratio", lambda config: config.model.lora is not None, "only `model.lora` has A and B"
    ),
    ConditionalKey("model.quantization.kind", _is_4_bit, "only bitsandbytes with 4 bits has kinds"),
    ConditionalKey("model.quantization.double", _is_4_bit, "only bitsandbytes with 4 bits quantizes its scales"),
    ConditionalKey(
        "export.merge",
        lambda config: adapter_of(config) is not None and not config.model.trains_prompt,
        "there are no adapters that can be merged into the base",
    ),
    ConditionalKey(
        "export.private", lambda config: config.export.push_to_hub is not None, "it needs `export.push_to_hub`"
    ),
    ConditionalKey(
        "run.local_folder",
        lambda config: is_url(config.run.folder),
        "only a run at a URL has one, and `run.folder` is a path",
    ),
    ConditionalKey(
        "checkpoint.allow_changes",
        lambda config: config.checkpoint.resume != "never",
        "with `resume: never` the run does not resume",
    ),
    ConditionalKey(
        "report.expert_load",
        lambda config: config.train.router_aux_loss is None,
        "`train.router_aux_loss` logs it already",
    ),
    ConditionalKey(
        "report.prometheus_address", lambda config: config.report.prometheus is not None, "it needs `report.prometheus`"
    ),
    ConditionalKey("report.project", lambda config: bool(config.report.trackers), "it needs `report.trackers`"),
)
