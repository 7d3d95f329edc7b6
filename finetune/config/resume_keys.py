"""How a resume handles keys that differ from the checkpoint's.

Every key is in one table. A key that is in no table, such as a new key, must match.

- MUST_MATCH: it changes the training; a different value is refused unless `checkpoint.allow_changes` names it.
- COMPARED_BY_CONTENT: its content (the training data, the tokenizer) is compared by digest, so the key itself may
  differ: moved rows are still the same rows.
- MAY_DIFFER: it changes a step at most in the last digits of its sums; differences are listed.
- NOT_RECORDED: it belongs to the current start: output folders, resuming, supervision.
"""

import json
from collections.abc import Iterator
from typing import Any

from finetune.config.plugins import plugin_identities
from finetune.config.run_config import RunConfig
from finetune.config.section import Section, join_key
from finetune.registry.observers import CALLBACKS, REPORTERS
from finetune.registry.tasks import METRICS
from finetune.runtime.text.redact import comparable_config, redact_foreign

MUST_MATCH = (
    "run.seed",
    *("model.name", "model.revision", "model.trust_remote_code", "model.dtype", "model.freeze"),
    "model.batch_norm",
    "model.train_only",
    "model.attention",  # the same function, but attention dropout draws different numbers
    *("model.rope_scaling", "model.rope_scaling.rope_type", "model.rope_scaling.factor"),
    "model.rope_scaling.original_max_position_embeddings",
    *("model.config", "model.from_config", "model.from_config.model_type", "model.from_config.values"),
    *("model.lora", "model.lora.rank", "model.lora.alpha", "model.lora.dropout", "model.lora.target_modules"),
    *("model.lora.modules_to_save", "model.lora.rslora", "model.lora.dora"),
    *("model.lora.experts", "model.lora.router"),
    *("model.lora.init", "model.lora.layers", "model.lora.rank_pattern", "model.lora.alpha_pattern"),
    *("model.peft", "model.peft.type", "model.peft.values", "model.adapter"),
    *("model.quantization", "model.quantization.method", "model.quantization.bits", "model.quantization.kind"),
    *("model.quantization.double", "model.quantization.compute_dtype"),
    *("model.new_tokens", "model.new_tokens.tokens", "model.new_tokens.special", "model.new_tokens.init"),
    *("model.image_processor", "model.image_processor.name", "model.image_processor.size"),
    *("model.image_processor.mean", "model.image_processor.std"),
    *("data.shuffle", "data.images.size", "data.images.crop_scale", "data.images.crop_padding"),
    *("data.images.flip", "data.images.mixup", "data.images.cutmix"),
    *("data.images.min_pixels", "data.images.max_pixels"),
    *("task.name", "task.label_smoothing", "task.z_loss"),
    *("task.classification.kind", "task.classification.labels", "task.classification.class_weights"),
    *("task.preference.loss", "task.preference.beta", "task.preference.label_smoothing"),
    *("task.preference.target_margin", "task.preference.sft_weight", "task.preference.desirable_weight"),
    *("task.preference.undesirable_weight", "task.reward.use_margin", "task.reward.centering"),
    *("task.distillation", "task.distillation.teacher", "task.distillation.teacher_dtype"),
    *("task.distillation.divergence", "task.distillation.jsd_beta", "task.distillation.temperature"),
    *("task.distillation.cross_entropy_weight", "task.distillation.top_k"),
    *("task.masked_lm.fraction", "task.masked_lm.random_fraction", "task.masked_lm.kept_fraction"),
    "task.masked_lm.whole_words",
    *("task.embedding.loss", "task.embedding.temperature", "task.embedding.symmetric"),
    *("task.embedding.matryoshka_dims", "task.embedding.pooling", "task.embedding.normalize"),
    *("task.embedding.prompts.query", "task.embedding.prompts.passage", "task.reranking.loss"),
    *("train.global_batch_size", "train.precision", "train.max_gradient_norm"),
    *("train.steps", "train.epochs", "train.tokens"),  # the budget determines the schedule
    *("train.learning_rate", "train.learning_rate_scaling"),
    *("train.learning_rate_scaling.rule", "train.learning_rate_scaling.base_global_batch_size"),
    *("train.optimizer.name", "train.optimizer.weight_decay", "train.optimizer.betas", "train.optimizer.eps"),
    *("train.optimizer.momentum", "train.optimizer.lora_plus_ratio", "train.optimizer.layer_decay"),
    *("train.optimizer.state_dtype", "train.optimizer.stochastic_rounding"),
    *("train.optimizer.rates", "train.unfreeze", "train.embedding_noise", "train.router_aux_loss"),
    *("train.average", "train.average.decay", "train.average.after_steps"),
    *("train.schedule.name", "train.schedule.warmup_steps", "train.schedule.warmup_fraction"),
    *("train.schedule.decay_fraction", "train.schedule.final_fraction"),
    *("task.loss", "plugin_options"),
)

COMPARED_BY_CONTENT = (
    *("data.train.path", "data.train.name", "data.train.config", "data.train.revision", "data.train.split"),
    *("data.train.format", "data.train.columns", "data.train.template", "data.train.skip", "data.train.take"),
    *("data.train.mix", "data.train.until", "data.train.stream", "data.train.stream.window_rows"),
    *("data.validation.fraction", "data.validation.hash_fraction", "data.validation.exclude_from_train"),
    *("data.truncate_side", "data.train_on", "data.train_on_reasoning", "data.chat_template_arguments"),
    *("data.batching.by", "data.batching.tokens", "data.batching.length_window_steps"),
    *("data.max_length", "data.over_length", "data.no_target", "data.chat_template", "data.system_prompt"),
    *("data.allow_special_tokens", "data.train.image_root"),
    *("data.train.delimiter", "data.train.quotes", "data.train.encoding", "data.train.records"),
    *("task.seq2seq.max_target_length", "task.seq2seq.source_prefix"),
    *("model.tokenizer", "model.tokenizer.name", "model.tokenizer.train", "model.tokenizer.train.vocabulary_size"),
    *("data.train.source", "plugins"),  # the digests of plugins are compared
)

MAY_DIFFER = (
    "run.deterministic",  # other kernels for the same sums
    "train.tf32",
    *("run.hang_after_seconds", "run.spot_notice", "run.strategy"),
    "model.gradient_checkpointing",  # computes the same values twice
    "model.activation_offload",  # the same values, stored elsewhere
    "model.compile",  # the same sums, fused differently; random numbers are the same as without
    "model.kernels",  # the same sums in one kernel
    *("train.fp8", "train.fp8.recipe", "train.fp8.emulate"),  # how products are rounded; that they are: train.precision
    "model.cache_folder",
    *("data.cache_folder", "data.prepare_workers", "data.num_workers", "data.pin_memory"),
    *("data.persistent_workers", "data.prefetch_factor", "data.train.stream.num_ahead"),
    *("data.train.follow_links", "data.validation.follow_links", "data.validation.template"),
    "data.validation.image_root",
    "data.batching.padding_free",  # the same samples in another layout
    *("data.audit.max_truncated_rows", "data.audit.max_dropped_rows", "data.audit.max_lost_targets"),
    *("data.audit.max_duplicate_samples", "data.audit.max_unknown_tokens", "data.audit.max_unread_rows"),
    "train.microbatch_size",  # cuts the same batch into other pieces
    "train.try_longest_batch",  # leaves everything as it was
    "train.optimizer.fused",  # one kernel for the same update
    "train.optimizer.in_backward",  # the same update, earlier
    "train.loss_kernel",  # the same sums, taken in another order
    *("train.nonfinite.action", "train.nonfinite.max_skips"),  # about steps that update nothing
    # They change the end of a run, not a step.
    *("train.time_limit_minutes", "train.stop_after_steps", "train.early_stopping", "train.early_stopping.metric"),
    *("train.early_stopping.goal", "train.early_stopping.patience", "train.early_stopping.min_delta"),
    # Evaluation has its own seeds and does not change the model.
    *("evaluate", "evaluate.every_steps", "evaluate.at_start", "evaluate.microbatch_size", "evaluate.generate"),
    *("evaluate.generate.num_samples", "evaluate.generate.max_new_tokens", "evaluate.generate.show"),
    *("evaluate.generate.metrics", "evaluate.generate.batch_size"),
    *("data.validation", "data.validation.path", "data.validation.name", "data.validation.config"),
    *("data.validation.revision", "data.validation.split", "data.validation.format", "data.validation.columns"),
    *("data.validation.skip", "data.validation.take", "data.validation.delimiter", "data.validation.quotes"),
    *("data.validation.encoding", "data.validation.records"),
    *("checkpoint.every_steps", "checkpoint.keep_last", "checkpoint.keep_every_steps", "checkpoint.keep_best"),
    *("checkpoint.keep_best.metric", "checkpoint.keep_best.goal", "checkpoint.keep_best.count"),
    *("checkpoint.asynchronous", "checkpoint.on_failure", "checkpoint.rehearse"),
    *("report.log_every_steps", "report.console", "report.trackers", "report.sample_ids", "report.project"),
    *("report.run_name", "report.entity", "report.group", "report.tags"),
    "report.expert_load",  # only counts
    *("report.profile", "report.profile.start", "report.profile.steps", "report.profile.memory"),
    *("report.profile.stacks", "report.prometheus", "report.prometheus_address"),
    "task.distillation.cache",  # the same probabilities, computed once
    *(
        "export.checkpoint",
        "export.dtype",
        "export.max_shard_size",
        "export.merge",
        "export.push_to_hub",
        "export.private",
    ),
    "export.verify",
    *("train.callbacks", "report.reporters", "data.validation.source"),
)

RECORDED_UNLESS_DEFAULT = (
    *("model.peft", "model.config", "model.rope_scaling", "model.lora.experts", "model.lora.router"),
    *("data.train.delimiter", "data.train.quotes", "data.train.encoding", "data.train.records"),
    *("data.validation.delimiter", "data.validation.quotes", "data.validation.encoding", "data.validation.records"),
    *("task.embedding.loss", "task.embedding.temperature", "task.embedding.symmetric"),
    *("task.embedding.matryoshka_dims", "task.embedding.pooling", "task.embedding.normalize"),
    *("task.embedding.prompts.query", "task.embedding.prompts.passage", "task.reranking.loss"),
    *("train.router_aux_loss", "train.try_longest_batch", "report.expert_load"),
    *("report.profile", "report.prometheus", "report.prometheus_address"),
    *("task.loss", "plugins", "plugin_options", "train.callbacks", "report.reporters"),
    *("data.train.source", "data.validation.source"),
)
"""Keys that older checkpoints do not have; with its default, such a key changes nothing in a run."""

NOT_RECORDED = (
    "version",
    *("run.folder", "run.local_folder", "checkpoint.resume", "checkpoint.allow_changes"),
    *("run.on_end", "run.record_layers"),
    *("run.hours_between_interruptions", "report.price_per_device_hour"),
)


_FRACTION = "data.validation.fraction"


def keys_that_must_match(config: RunConfig) -> dict[str, str]:
    """Return the dotted keys that a resume must match, with their values as JSON, and the digests of plugins."""
    others = {*COMPARED_BY_CONTENT, *MAY_DIFFER, *NOT_RECORDED}
    keys = {key: text for key, text in _flat(config) if key not in others and not _is_option_of_observer(key)}
    return {**keys, **plugin_identities(config)[0]}


def keys_that_may_differ(config: RunConfig) -> dict[str, str]:
    """Return the dotted keys that may differ between starts, with their values as JSON, and such digests."""
    recorded = {*COMPARED_BY_CONTENT, *MAY_DIFFER}
    keys = {key: text for key, text in _flat(config) if key in recorded or _is_option_of_observer(key)}
    if keys.get(_FRACTION, "null") != "null":
        keys[_FRACTION] += ", an exact number of rows"  # was a draw per row: the reason that other rows are held out
    return {key: redact_foreign(text) for key, text in keys.items()} | plugin_identities(config)[1]


def _is_option_of_observer(key: str) -> bool:
    """Return whether the key is an option of a callback, a reporter or a metric, which change no step."""
    section, _, option = key.partition(".")
    name = option.partition(".")[0]
    return section == "plugin_options" and any(name in table for table in (CALLBACKS, REPORTERS, METRICS))


def _flat(section: Section, *, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield every key with its value; an optional section is `null` or `written`, followed by its keys.

    Secrets are left out, and so are signatures of URLs: a URL with a new signature is the same.
    """
    for name, field in type(section).model_fields.items():
        key, value = join_key(prefix, name), getattr(section, name)
        if key in RECORDED_UNLESS_DEFAULT and value == field.default:
            continue
        if not isinstance(value, Section):
            plain = json.loads(json.dumps(value, default=_plain))
            yield key, json.dumps(comparable_config(plain, name=name), sort_keys=True, ensure_ascii=False)
            continue
        if field.annotation is not type(value):
            yield key, "written"
        yield from _flat(value, prefix=key)


def _plain(section: Section) -> dict[str, Any]:
    """Return a section in a list, which is one of `data.train.mix`, as plain JSON types."""
    fields = type(section).model_fields
    return {
        name: value
        for name, value in section.model_dump().items()
        if f"data.train.{name}" not in RECORDED_UNLESS_DEFAULT or value != fields[name].default
    }
