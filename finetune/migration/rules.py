"""The vocabulary of the peers' tables: what becomes of a key, and how its value is converted."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Convert = Callable[[Any], Any]


class NoCounterpart(Exception):
    """Raised by a converter for a value that a job cannot express; its text is what to do instead."""


@dataclass(frozen=True)
class Rule:
    """What becomes of a key: `name` is our key or a fact that completes the job, `why` the reason that it has neither.

    `note` is what its value meant in addition there, for the comments at the top of the job.
    """

    kind: Literal["key", "fact", "not_needed", "not_possible"]
    name: str = ""
    why: str = ""
    convert: Convert = lambda value: value
    note: str = ""


Table = Mapping[str, Rule]
"""From the peer's keys, with `[]` for positions; `section.*` stands for every key in a section that is not listed."""


def to(key: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    """Write our key with the converted value, unless that is its default."""
    return Rule("key", key, convert=convert, note=note)


def fact(name: str, convert: Convert = lambda value: value, *, note: str = "") -> Rule:
    """Keep the converted value under this name: our keys are derived from several facts."""
    return Rule("fact", name, convert=convert, note=note)


def ours(why: str) -> Rule:
    """Name the key as not needed, for this reason."""
    return Rule("not_needed", why=why)


def no(instead: str) -> Rule:
    """Name the key as not possible, with what to do instead; where it is off there, it is not needed."""
    return Rule("not_possible", why=instead)


QAT = "quantization-aware training has no counterpart: train in bf16, then quantize the export."
RL = "reinforcement learning is not a task here: use the Session API (docs/how-to/session.md)."
CACHED = "tokenized rows are cached by their content and the tokenizer"
ANSWERS = "how answers are generated is for `finetune chat` and `evaluate.generate`"
qat = no(QAT)


def each(rule: Rule, keys: str) -> Table:
    """Return the rule for each of these keys, between which there are blanks."""
    return dict.fromkeys(keys.split(), rule)


def is_off(value: Any) -> bool:
    """Return whether a value switches off: null, false, 0, an empty text, list or section, or a word such as `none`."""
    if isinstance(value, str):
        return value.strip().lower() in ("", "no", "none", "off", "false", "null")
    return value in (None, False, 0, [], {})


def truth(value: Any) -> bool:
    """Return a truth value, also of the words that YAML 1.1 reads as one; `auto` is true."""
    words = {"true": True, "yes": True, "on": True, "auto": True, "false": False, "no": False, "off": False}
    found = words.get(str(value).lower(), {0: False, 1: True}.get(value) if isinstance(value, int) else None)
    if found is None:
        raise NoCounterpart("this is not `true` or `false`. Correct it and run this again.")
    return found


def number(value: Any) -> float:
    """Return a number, also of a text such as `1e-4`, which YAML 1.1 does not read as one."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise NoCounterpart("this is not a number. Correct it and run this again.") from None
    if isinstance(value, bool) or result != result or abs(result) == float("inf"):
        raise NoCounterpart("this is not a finite number. Correct it and run this again.")
    return result


def whole(value: Any) -> int:
    """Return a whole number."""
    result = number(value)
    if result != int(result):
        raise NoCounterpart("this is not a whole number. Correct it and run this again.")
    return int(result)


def positive(value: Any) -> int:
    """Return a whole number of at least 1."""
    if (result := whole(value)) < 1:
        raise NoCounterpart("this is not at least 1. Correct it and run this again.")
    return result


def text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise NoCounterpart("this is not a text. Correct it and run this again.")
    return str(value)


def words(value: Any) -> list[str]:
    """Return a list of texts, also of a text with commas or blanks between them."""
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list):
        raise NoCounterpart("this is not a list of texts. Correct it and run this again.")
    return [text(item) for item in value]


def optional_number(value: Any) -> float | None:
    """Return a number, or None for a word that switches off."""
    return None if is_off(value) and not isinstance(value, int | float) else number(value)


def numbers(value: Any) -> list[float]:
    """Return a list of numbers."""
    if not isinstance(value, list):
        raise NoCounterpart("this is not a list of numbers. Correct it and run this again.")
    return [number(item) for item in value]


def first(value: Any) -> str:
    """Return a text, or the only one of a list; several files are a glob."""
    names = words(value)
    if len(names) != 1:
        raise NoCounterpart("write one path or a glob, such as `rows/*.jsonl`.")
    return names[0]


def component(value: Any) -> str:
    """Return the dotted name of a class or a function."""
    written = text(value)
    if not re.fullmatch(r"[\w.]+", written):
        raise NoCounterpart("this is not the dotted name of a class or a function.")
    return written


def choose(choices: Mapping[str, Any], instead: str) -> Convert:
    """Return a converter of words, whatever their case; another word is not possible."""

    def convert(value: Any) -> Any:
        word = str(value).lower()
        if word not in choices:
            raise NoCounterpart(instead)
        return choices[word]

    return convert


def modules(value: Any) -> list[str] | str:
    """Return the modules of adapters: names, `all-linear`, or those that a regular expression ends with."""
    if isinstance(value, str) and value.lower() in ("all", "all-linear"):
        return "all-linear"
    if isinstance(value, str) and re.search(r"[\\()|*\[]", value):
        match = re.search(r"\(([\w|]+)\)(_\w+)?$", value)
        if match is None:
            raise NoCounterpart("a regular expression: write the names of the modules in `model.lora.target_modules`.")
        return [f"{name}{match[2] or ''}" for name in match[1].split("|")]
    names = words(value)
    return "all-linear" if names in (["all"], ["all-linear"]) else names


def flag(value: Any) -> Convert:
    """Return a converter of a switch that, where it is on, stands for this value of ours, and else for `auto`."""
    return lambda written: value if truth(written) else "auto"


def path(value: Any) -> str:
    """Return a path such that a job reads it as one: `./folder` for `folder`."""
    written = text(value)
    return written if written.startswith((".", "/", "~")) or "://" in written else f"./{written}"


def address(value: Any) -> str:
    """Return the address of a host."""
    return "127.0.0.1" if value == "localhost" else text(value)


OPTIMIZER_ADVICE = (
    "choose one of `train.optimizer.name`: adamw, adafactor, adamw_8bit, muon, lion, ... (docs/how-to/learning.md)."
)

optimizer = choose(
    {
        **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
        **dict.fromkeys(("adamw_torch_xla", "adamw_anyprecision", "adam"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "adamw8bit"), "adamw_8bit"),
        **dict.fromkeys(("adamw_torch_4bit", "adamw4bit"), "adamw_4bit"),
        **dict.fromkeys(("paged_adamw", "paged_adamw_32bit", "pagedadamw"), "paged_adamw"),
        **dict.fromkeys(("paged_adamw_8bit", "pagedadamw8bit"), "paged_adamw_8bit"),
        **dict.fromkeys(("lion", "lion_32bit", "lion_pytorch"), "lion"),
        **{"schedule_free_adamw": "schedule_free_adamw", "adamwschedulefree": "schedule_free_adamw"},
        **{"adafactor": "adafactor", "sgd": "sgd", "muon": "muon"},
    },
    OPTIMIZER_ADVICE,
)
"""Names of optimizers, of Trainer and of the classes of torch, bitsandbytes and torchao in small letters."""

attention = choose(
    {
        **{"sdpa": "sdpa", "eager": "eager", "flex_attention": "flex_attention", "flex": "flex_attention"},
        **{"auto": "auto", "fa2": "flash_attention_2", "flash_attn": "flash_attention_2"},
        **{"flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_3"},
        **{"flash_attn_3": "flash_attention_3", "disabled": "eager", "xformers": "auto"},
        **{"kernels-community/flash-attn2": "flash_attention_2", "kernels-community/flash-attn": "flash_attention_2"},
        **{
            "kernels-community/vllm-flash-attn3": "flash_attention_3",
            "kernels-community/flash-attn3": "flash_attention_3",
        },
    },
    "remove it: `model.attention: auto` chooses what the model supports.",
)

dtype = choose(
    {
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16", "auto"), "bfloat16"),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    },
    "choose one of `model.dtype`: float32, bfloat16, float16.",
)

compiled = choose(
    {"true": "regional", "auto": "regional", "false": "off"}, "write `regional` or `full` in `model.compile`."
)
adapter = choose(
    {"lora": "lora", "qlora": "qlora", "oft": "oft", "full": "full", "": "full", "none": "full"},
    "write `model.peft`: {type: ..., values: {...}}.",
)
lora_init = choose(
    {"true": "default", **{name: name for name in ("gaussian", "pissa", "olora", "loftq")}},
    "choose one of `model.lora.init`.",
)
over_length = choose(
    {
        **{"drop": "drop", "delete": "drop", "truncate": "truncate", "right": "truncate", "left": "truncate"},
        **{"raise": "refuse", "split": "split", "keep_start": "truncate", "keep_end": "truncate"},
    },
    "choose one of `data.over_length`.",
)
by_length = choose({"true": 16, "false": "auto"}, "write a number of steps.")
checkpointing = choose(
    {"true": True, "false": False, **dict.fromkeys(("unsloth", "offload", "legacy", "disk"), True)},
    "write `true`, `selective` or a number.",
)


def component_optimizer(value: Any) -> str:
    """Return the optimizer of a class by its dotted name."""
    found: str = optimizer(component(value).rpartition(".")[2].lower())
    return found
