"""Turns pydantic's validation errors into problems: the dotted key, the written value and the value to write instead.

The valid part of such a config is kept as a draft, so that the rules can still check it.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError

from finetune.config.formatting import (
    MAX_SHOWN_CHARACTERS,
    closest,
    format_list,
    format_value,
    type_name,
)
from finetune.config.run_config import RunConfig
from finetune.config.schema import (
    Node,
    all_keys,
    branches,
    describe_values,
    description_of,
    exceeds_ceiling,
    keys_of,
    node_at,
)
from finetune.config.section import Section, join_key, parent_keys
from finetune.config.yaml import MAX_LISTED, read_yaml
from finetune.errors import Problem
from finetune.runtime.text.redact import redacted_config
from finetune.runtime.text.terminal import format_json

KEYS_OF_OTHER_TOOLS: Mapping[str, str] = {
    "base_model": "model.name",
    "batch_size": "train.global_batch_size",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "datasets": "data.train",
    "device_batch_size": "train.microbatch_size",
    "eval_steps": "evaluate.every_steps",
    "grad_clip": "train.max_gradient_norm",
    "gradient_clipping": "train.max_gradient_norm",
    "learning_rate_scheduler": "train.schedule",
    "logging_steps": "report.log_every_steps",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "lr": "train.learning_rate",
    "lr_scheduler_type": "train.schedule.name",
    "max_grad_norm": "train.max_gradient_norm",
    "max_seq_length": "data.max_length",
    "max_steps": "train.steps",
    "micro_batch_size": "train.microbatch_size",
    "mixed_precision": "train.precision",
    "model_name_or_path": "model.name",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "optim": "train.optimizer.name",
    "output_dir": "run.folder",
    "per_device_eval_batch_size": "evaluate.microbatch_size",
    "per_device_train_batch_size": "train.microbatch_size",
    "r": "model.lora.rank",
    "report_to": "report.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "sequence_len": "data.max_length",
    "torch_dtype": "model.dtype",
    "use_dora": "model.lora.dora",
    "use_rslora": "model.lora.rslora",
    "warmup_ratio": "train.schedule.warmup_fraction",
}
"""The last part of other tools' keys, and the equivalent key of a job."""

UNSUPPORTED_KEYS: Mapping[str, str] = {
    "accumulate_grad_batches": "accumulation is derived: set `train.global_batch_size` and `train.microbatch_size`",
    "bf16": "write `train.precision: bf16`",
    "deepspeed": "the strategy is chosen by the accelerate config with which the run is launched",
    "fp16": "write `train.precision: fp16`",
    "fsdp": "the strategy is chosen by the accelerate config with which the run is launched",
    "gradient_accumulation_steps": "accumulation is derived: set `train.global_batch_size` and `train.microbatch_size`",
    "hf_token": "secrets do not belong in a job file: log in with `hf auth login` or set HF_TOKEN in the environment",
    "token": "secrets do not belong in a job file: log in with `hf auth login` or set HF_TOKEN in the environment",
    "wandb_api_key": "secrets do not belong in a job file: set WANDB_API_KEY in the environment",
}
"""Keys of other tools without an equivalent, and the advice for each."""


@dataclass(frozen=True)
class InvalidKey:
    """A key that does not match the schema; `meant` is the key that an unknown key probably means."""

    key: str
    type: str
    value: Any
    meant: str | None = None

    def problem(self) -> Problem:
        """Return it as a message for the user."""
        if self.type == "extra_forbidden":
            return Problem(self.key, _unknown_key(self.key))
        node, value = node_at(self.key) or {}, self.value
        if self.key == "run.on_end" and isinstance(value, dict):
            return Problem(self.key, _END_IS_A_COMMAND)
        if self.type == "missing":
            what = description_of(node).rstrip(".")
            what = what[:1].lower() + what[1:] if what[1:2].islower() else what
            message = f"the key is missing: {what}. Write {describe_values(node)}."
            if keys_of(node):
                required = [f"{self.key}.{name}" for branch in branches(node) for name in branch.get("required", ())]
                needs = f" It needs {format_list(required)}." if required else f" {_keys_in(node)}"
                message = f"the section is missing: {what}.{needs}"
            return Problem(self.key, message)
        # The written value, the most likely fix, and the allowed values.
        is_right_kind = any(type_name(value) in _TYPE_NAMES.get(str(each.get("type")), ()) for each in branches(node))
        complaint = f"{format_value(value)} is {'not allowed' if is_right_kind else type_name(value)}."
        complaint = complaint if value is not None else "there is no value."
        fits = f"Write {describe_values(node, in_full=exceeds_ceiling(value, node))}."
        hint = ""
        if likely := _likely_value(self.key, value):
            unquoted = ", without quotes" if isinstance(value, str) and value.strip() == likely else ""
            hint = f"Did you mean `{likely}`{unquoted}?"
        if not hint and keys_of(node) and not isinstance(value, dict):
            hint = _keys_in(node)
        return Problem(self.key, " ".join(part for part in (complaint, hint, fits) if part))


_END_IS_A_COMMAND = (
    "it is a command now, not a section. Write `on_end: COMMAND`, which runs however the run ends; test "
    "`$FINETUNE_OUTCOME` in it."
)


def _keys_in(section: Node) -> str:
    return f"Its keys are {format_list(keys_of(section))}."


def read_validation_errors(error: ValidationError, values: Any) -> list[InvalidKey]:
    """Return one entry for every invalid key, however many errors pydantic reports for it.

    Where both a list and one of its items are invalid, only the item is reported.
    """
    errors = error.errors(include_url=False, include_context=False)
    keyed = [(_dotted_key(each["loc"], values, is_missing=each["type"] == "missing"), each) for each in errors]
    keyed.sort(key=lambda pair: pair[0])
    invalid, num_meant = [], 0
    for key, pairs in groupby(keyed, key=lambda pair: pair[0]):
        first = next(pairs)[1]
        is_unknown = first["type"] == "extra_forbidden"
        num_meant += is_unknown
        meant = None
        if is_unknown and num_meant <= MAX_LISTED:  # a key of the same section, or the equivalent of another tool's
            meant = _suggested_sibling(key) or KEYS_OF_OTHER_TOOLS.get(key.rpartition(".")[2])
        invalid.append(InvalidKey(key, first["type"], first["input"], meant))
    meant_keys = {fault.meant for fault in invalid}
    outer = {parent for fault in invalid for parent in parent_keys(fault.key)}
    return [
        each for each in invalid if each.key not in outer and not (each.type == "missing" and each.key in meant_keys)
    ]


def _dotted_key(location: Sequence[int | str], values: Any, *, is_missing: bool) -> str:
    """Return the dotted key of pydantic's location, without the tags of unions, which are not keys."""
    parts: list[int | str] = []
    for index, part in enumerate(location):
        is_last = index == len(location) - 1
        if isinstance(values, dict) and (part in values or (is_missing and is_last)):
            parts.append(part)
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int):
            parts.append(part)
            values = values[part]
    return join_key(*parts)


def _unknown_key(key: str) -> str:
    here, _, name = key.rpartition(".")
    meant = _suggested_sibling(key)
    if here == "plugin_options" and meant is None:
        known = format_list(keys_of(node_at(here) or {}))
        return f"no plugin of this job has options under this name; known: {known}. Name its module in `plugins`."
    if meant is not None and name not in UNSUPPORTED_KEYS:
        return f"there is no such key. Did you mean `{meant.rpartition('.')[2]}`?"
    if name in UNSUPPORTED_KEYS:
        return f"there is no such key; {UNSUPPORTED_KEYS[name]}."
    by_name: dict[str, list[str]] = {}  # elsewhere in the job
    for other, _ in all_keys():
        by_name.setdefault(other.rpartition(".")[2], []).append(other)
    near = name if name in by_name else closest(name, by_name, cutoff=0.85)
    elsewhere = [KEYS_OF_OTHER_TOOLS[name]] if name in KEYS_OF_OTHER_TOOLS else by_name.get(near or "", [])
    if elsewhere and len(elsewhere) <= _MAX_PLACES:  # a name in more places means something else in each
        return f"there is no such key. There is {format_list(elsewhere, last='and')}."
    where = f"`{here}`" if here else "A job"
    return f"there is no such key. {where} has {format_list(keys_of(node_at(here) or {}))}."


_MAX_PLACES = 3


def _suggested_sibling(key: str) -> str | None:
    """Return the closest key of the same section; None if no key is close."""
    here, _, name = key.rpartition(".")
    if name in KEYS_OF_OTHER_TOOLS:
        meant = KEYS_OF_OTHER_TOOLS[name]
        return meant if meant.rpartition(".")[0] == here else None
    near = closest(name, keys_of(node_at(here) or {}))
    return join_key(here, near) if near else None


_TYPE_NAMES: Mapping[str, tuple[str, ...]] = {
    "integer": ("a whole number",),
    "number": ("a number", "a whole number"),
    "string": ("text",),
    "array": ("a list",),
    "object": ("a section",),
    "boolean": ("a truth value",),
}
"""The Python types of each type of JSON schema."""


def _likely_value(key: str, value: Any) -> str:
    """Return the valid value that the key's invalid one probably means, as YAML; an empty text if there is none."""
    choices = {
        str(choice).lower(): choice
        for kind in branches(node_at(key) or {})
        for choice in kind.get("enum", [kind["const"]] if "const" in kind else [])
    }
    near = closest(str(value).strip(), choices) if isinstance(value, str | int) else None
    readings = [] if near is None else [choices[near]]
    if isinstance(value, str):
        readings += [read_yaml(text).values for text in (value, f"[{value}]")]  # `"4"`, `a, b`
    elif isinstance(value, list) and len(value) == 1:
        readings += value
    elif isinstance(value, float) and value.is_integer():
        readings.append(int(value))
    for reading in readings:
        text = reading if isinstance(reading, str) else format_json(reading)
        if isinstance(reading, int | float) and isinstance(value, str):
            text = value.strip()
        is_shown = len(text) <= MAX_SHOWN_CHARACTERS and redacted_config(reading) == reading
        if is_shown and repr(reading) != repr(value) and _is_valid(key, reading):
            return text
    return ""


def _is_valid(key: str, value: Any) -> bool:
    """Return whether the value is valid for the key, whatever the rest of the job."""
    job: Any = value
    for part in reversed(key.split(".")):
        job = [job] if part.isdecimal() else {part: job}
    key = ".".join("0" if part.isdecimal() else part for part in key.split("."))
    try:
        RunConfig.model_validate(job)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        located = (_dotted_key(each["loc"], job, is_missing=each["type"] == "missing") for each in faults)
        return not any(key in (other, *parent_keys(other)) for other in located)
    return True


S = TypeVar("S", bound=Section)


def draft_section(kind: type[S], values: Mapping[str, Any], *, broken: Set[str]) -> S:
    """Return a section without its invalid keys: reading one of them raises AttributeError.

    `broken` are dotted keys as in the file; keys that are not set have their defaults.
    """
    outer = broken | {parent for key in broken for parent in parent_keys(key)}
    return _draft_at(kind, values, broken=broken, outer=outer, prefix="")


def _draft_at(kind: type[S], values: Mapping[str, Any], *, broken: Set[str], outer: Set[str], prefix: str) -> S:
    """Return the section at the prefix; `outer` are the invalid keys and their parent keys."""
    made: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        key = join_key(prefix, name)
        if key in broken or (name not in values and field.is_required()):
            continue
        if name not in values:
            made[name] = field.get_default(call_default_factory=True)
            continue
        value = values[name]
        inner = next(_section_types(field.annotation), None)
        if isinstance(value, dict) and inner is not None:
            made[name] = _draft_at(inner, value, broken=broken, outer=outer, prefix=key)
        elif isinstance(value, list) and inner is not None and all(isinstance(item, dict) for item in value):
            item_keys = [join_key(key, number) for number in range(len(value))]
            made[name] = tuple(
                _draft_at(inner, item, broken=broken, outer=outer, prefix=item_key)
                for item, item_key in zip(value, item_keys, strict=True)
            )
        elif key not in outer:
            made[name] = tuple(value) if isinstance(value, list) else value
    section = cast(S, kind.model_construct(_fields_set=set(values) & set(made), **made))
    for name in kind.model_fields.keys() - made.keys():
        section.__dict__.pop(name, None)
    return section


def _section_types(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _section_types(part)
