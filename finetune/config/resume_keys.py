"""How a resume handles keys that differ from the checkpoint's.

A key that is in no table, such as a new key, must match: it changes the training, and a different value is refused
unless `checkpoint.allow_changes` names it.

- COMPARED_BY_CONTENT: its content (the training data, the tokenizer) is compared by digest, so the key itself may
  differ: moved rows are still the same rows.
- MAY_DIFFER: it changes a step at most in the last digits of its sums; differences are listed.
- NOT_RECORDED: it belongs to the current start: output folders, resuming, supervision.
"""

import json
from collections.abc import Iterator
from typing import Any

from finetune.config.plugins import PLUGIN_PREFIX, plugin_identities
from finetune.config.run_config import RunConfig
from finetune.config.schema import all_keys, branches, keys_of
from finetune.config.section import Section, join_key, parent_keys
from finetune.registry.observers import CALLBACKS, REPORTERS
from finetune.registry.tasks import METRICS
from finetune.runtime.text.redact import comparable_config, redact_foreign


class ResumeKeys(frozenset[str]):
    """Keys that a resume handles in one way; a section stands for all of its keys that no table names."""

    def __contains__(self, key: object) -> bool:
        name = str(key)
        names = (name,) if name.startswith(PLUGIN_PREFIX) else (name, *parent_keys(name))  # of digests, not of keys
        tables = (COMPARED_BY_CONTENT, MAY_DIFFER, NOT_RECORDED)
        return next((table for name in names for table in tables if frozenset.__contains__(table, name)), None) is self


COMPARED_BY_CONTENT = ResumeKeys(
    (
        *("data.train", "data.validation.fraction", "data.validation.hash_fraction"),
        *("data.validation.exclude_from_train", "data.truncate_side", "data.train_on", "data.train_on_reasoning"),
        *("data.batching.by", "data.batching.tokens", "data.batching.length_window_steps", "data.max_length"),
        *("data.over_length", "data.no_target", "data.chat_template", "data.chat_template_arguments"),
        *("data.system_prompt", "data.allow_special_tokens", "task.seq2seq", "model.tokenizer"),
        "plugins",  # the digests of plugins are compared
    )
)

MAY_DIFFER = ResumeKeys(
    (
        "run.deterministic",  # other kernels for the same sums
        "train.tf32",
        *("run.hang_after_seconds", "run.spot_notice", "run.strategy"),
        "model.gradient_checkpointing",  # computes the same values twice
        "model.activation_offload",  # the same values, stored elsewhere
        "model.compile",  # the same sums, fused differently; random numbers are the same as without
        "model.kernels",  # the same sums in one kernel
        "train.fp8",  # how products are rounded; that they are: train.precision
        *("model.cache_folder", "data.cache_folder", "data.prepare_workers", "data.num_workers", "data.pin_memory"),
        *("data.persistent_workers", "data.prefetch_factor", "data.train.stream.num_ahead", "data.train.follow_links"),
        "data.batching.padding_free",  # the same samples in another layout
        "data.audit",
        "train.microbatch_size",  # cuts the same batch into other pieces
        "train.try_longest_batch",  # leaves everything as it was
        "train.optimizer.fused",  # one kernel for the same update
        "train.optimizer.in_backward",  # the same update, earlier
        "train.loss_kernel",  # the same sums, taken in another order
        "train.nonfinite",  # about steps that update nothing
        # They change the end of a run, not a step.
        *("train.time_limit_minutes", "train.stop_after_steps", "train.early_stopping"),
        *("evaluate", "data.validation"),  # evaluation has its own seeds and does not change the model
        *("checkpoint", "report", "export", "train.callbacks"),
        "task.distillation.cache",  # the same probabilities, computed once
    )
)

NOT_RECORDED = ResumeKeys(
    (
        *("version", "run.folder", "run.local_folder", "checkpoint.resume", "checkpoint.allow_changes", "run.on_end"),
        *("run.record_layers", "run.hours_between_interruptions", "report.price_per_device_hour"),
    )
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


_FRACTION = "data.validation.fraction"


def must_match(key: str) -> bool:
    """Return whether a resume refuses another value of the key."""
    return not any(key in table for table in (COMPARED_BY_CONTENT, MAY_DIFFER, NOT_RECORDED))


def all_keys_to_match() -> list[str]:
    """Return the keys of a job that must match, without sections that are always there."""
    values = (
        key for key, node in all_keys() if not keys_of(node) or any(b.get("type") == "null" for b in branches(node))
    )
    return [key for key in values if must_match(key)]


def keys_that_must_match(config: RunConfig) -> dict[str, str]:
    """Return the dotted keys that a resume must match, with their values as JSON, and the digests of plugins."""
    keys = {key: text for key, text in _flat(config) if must_match(key) and not _is_option_of_observer(key)}
    return {**keys, **plugin_identities(config)[0]}


def keys_that_may_differ(config: RunConfig) -> dict[str, str]:
    """Return the dotted keys that may differ between starts, with their values as JSON, and such digests."""
    recorded = ((key, text) for key, text in _flat(config) if key not in NOT_RECORDED)
    keys = {key: text for key, text in recorded if not must_match(key) or _is_option_of_observer(key)}
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
