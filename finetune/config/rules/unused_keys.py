"""Keys that have no effect in this combination: writing one of them is an error."""

from collections.abc import Iterator
from functools import partial

from finetune.config.formatting import format_list
from finetune.config.paths import is_path, is_url
from finetune.config.rules.model import MERGEABLE, adapter_of, trained_dtypes
from finetune.config.rules.unused_task_keys import ConditionalKey, conditional_source_keys, conditional_task_keys
from finetune.config.run_config import RunConfig
from finetune.config.section import has_key, is_written
from finetune.errors import Problem
from finetune.registry.optimizers import OPTIMIZERS, optimizers_that_read
from finetune.registry.schedules import SCHEDULES
from finetune.registry.trackers import trackers_that_read


def no_unused_keys(config: RunConfig) -> Iterator[Problem]:
    """Every key that is set has an effect."""
    for effect in _conditional_keys(config):
        try:
            is_idle = is_written(config, effect.key) and not effect.has_effect(config)
        except AttributeError:  # a draft: one of the keys that decide is invalid
            continue
        if is_idle:
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
        names = optimizers_that_read(key)
        needs = f"only {format_list(names)} {'has' if len(names) == 1 else 'have'} {text}"
        yield ConditionalKey(f"train.optimizer.{key}", partial(_reads, key=key), needs)


def tracker_keys() -> Iterator[ConditionalKey]:
    """Yield the keys of `report:` that only some trackers read."""
    for key in ("run_name", "entity", "group", "tags"):
        names = trackers_that_read(key)
        needs = f"only {format_list(names)} read it, and `report.trackers` names none of them"
        yield ConditionalKey(f"report.{key}", partial(_tracks_with, names=frozenset(names)), needs)


def _tracks_with(config: RunConfig, *, names: frozenset[str]) -> bool:
    return not names.isdisjoint(config.report.trackers)


def _reads(config: RunConfig, *, key: str) -> bool:
    return key in OPTIMIZERS[config.train.optimizer.name].reads


def _updates_in_one_kernel(config: RunConfig) -> bool:
    section = config.train.optimizer
    is_plain = {section.state_dtype or dtype for dtype in trained_dtypes(config)} == trained_dtypes(config)
    is_low_bit = _reads(config, key="state_dtype") and (section.stochastic_rounding or not is_plain)
    return _reads(config, key="fused") and not is_low_bit


def _trains_in_bfloat16(config: RunConfig) -> bool:
    return trained_dtypes(config) == {"bfloat16"} and _reads(config, key="stochastic_rounding")


def _decays(config: RunConfig) -> bool:
    return SCHEDULES[config.train.schedule.name].decays


def _has_decay_phase(config: RunConfig) -> bool:
    return SCHEDULES[config.train.schedule.name].has_decay_phase


def _skips(config: RunConfig) -> bool:
    return config.train.nonfinite.action == "skip"


def _has_workers(config: RunConfig) -> bool:
    return config.data.num_workers != 0


def _is_from_hub(config: RunConfig) -> bool:
    return config.model.name is not None and not is_path(config.model.name)


def _runs_model_code(config: RunConfig) -> bool:
    return config.model.from_config is None


def _downloads(config: RunConfig) -> bool:
    tokenizer = config.model.tokenizer
    has_hub_tokenizer = tokenizer is not None and tokenizer.name is not None and not is_path(tokenizer.name)
    return _is_from_hub(config) or has_hub_tokenizer


def _trains_own_weights(config: RunConfig) -> bool:
    return adapter_of(config) is None


def _has_lora(config: RunConfig) -> bool:
    return config.model.lora is not None


def _can_merge(config: RunConfig) -> bool:
    return adapter_of(config) in MERGEABLE


def _is_pushed(config: RunConfig) -> bool:
    return config.export.push_to_hub is not None


def _is_4_bit(config: RunConfig) -> bool:
    section = config.model.quantization
    return section is not None and (section.method, section.bits) == ("bitsandbytes", 4)


def _has_no_router_loss(config: RunConfig) -> bool:
    return config.train.router_aux_loss is None


def _has_trackers(config: RunConfig) -> bool:
    return bool(config.report.trackers)


def _has_metrics(config: RunConfig) -> bool:
    return config.report.prometheus is not None


def _is_remote(config: RunConfig) -> bool:
    return is_url(config.run.folder)


def _continues(config: RunConfig) -> bool:
    return config.checkpoint.resume != "never"


def _batches_by(config: RunConfig, *, names: tuple[str, ...]) -> bool:
    return config.data.batching.by in names


def _truncates(config: RunConfig) -> bool:
    return config.data.over_length == "truncate"


def _is_weighted(config: RunConfig) -> bool:
    return any(source.weight is not None for source in config.data.train.mix)


def _runs_when(config: RunConfig, *, outcomes: frozenset[str]) -> bool:
    section = config.run.on_end_section
    return section is not None and not outcomes.isdisjoint(section.when)


CONDITIONAL_KEYS: tuple[ConditionalKey, ...] = (
    ConditionalKey(
        "train.optimizer.fused", _updates_in_one_kernel, "only AdamW has a fused kernel, without stochastic rounding"
    ),
    ConditionalKey(
        "train.optimizer.stochastic_rounding",
        _trains_in_bfloat16,
        "it applies to `adamw` on weights trained in bfloat16 (`model.dtype`)",
    ),
    ConditionalKey(
        "train.schedule.decay_fraction", _has_decay_phase, "only `name: warmup_stable_decay` has a separate decay phase"
    ),
    ConditionalKey("train.schedule.final_fraction", _decays, "a constant rate never decays"),
    ConditionalKey("train.nonfinite.max_skips", _skips, "only `action: skip` skips steps"),
    ConditionalKey("data.truncate_side", _truncates, "only `over_length: truncate` truncates"),
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
    ConditionalKey("data.train.until", _is_weighted, "only `data.train.mix` with weights has no fixed length"),
    ConditionalKey("model.config", _runs_model_code, "the values of a new model are in `model.from_config.values`"),
    ConditionalKey(
        "model.rope_scaling", _runs_model_code, "that of a new model is `rope_scaling` in `model.from_config.values`"
    ),
    ConditionalKey("model.revision", _is_from_hub, "only a hub model has revisions"),
    ConditionalKey("model.trust_remote_code", _runs_model_code, "a model built from its config runs no remote code"),
    ConditionalKey("model.cache_folder", _downloads, "nothing is downloaded from the hub"),
    ConditionalKey("model.train_only", _trains_own_weights, "with adapters all of the model's own weights are frozen"),
    ConditionalKey("model.freeze", _trains_own_weights, "with adapters all of the model's own weights are frozen"),
    ConditionalKey("train.optimizer.lora_plus_ratio", _has_lora, "only `model.lora` has A and B"),
    ConditionalKey("model.quantization.kind", _is_4_bit, "only bitsandbytes with 4 bits has kinds"),
    ConditionalKey("model.quantization.double", _is_4_bit, "only bitsandbytes with 4 bits quantizes its scales"),
    ConditionalKey("export.merge", _can_merge, "there are no adapters that can be merged into the base"),
    ConditionalKey("export.private", _is_pushed, "it needs `export.push_to_hub`"),
    ConditionalKey("run.local_folder", _is_remote, "only a run at a URL has one, and `run.folder` is a path"),
    ConditionalKey(
        "run.on_end.idle_after_seconds",
        partial(_runs_when, outcomes=frozenset({"idle"})),
        "`run.on_end.when` does not have `idle`",
    ),
    ConditionalKey(
        "run.on_end.restart_seconds",
        partial(_runs_when, outcomes=frozenset({"failed", "failed_start", "stopped", "interrupted"})),
        "`run.on_end.when` has no end after which a run is started again",
    ),
    ConditionalKey("checkpoint.allow_changes", _continues, "with `resume: never` the run does not resume"),
    ConditionalKey("report.expert_load", _has_no_router_loss, "`train.router_aux_loss` logs it already"),
    ConditionalKey("report.prometheus_address", _has_metrics, "it needs `report.prometheus`"),
    ConditionalKey("report.project", _has_trackers, "it needs `report.trackers`"),
)
