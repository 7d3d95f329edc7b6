"""Rules of `model:` and `report:` - where weights and tokenizer come from, and names that must be known."""

import math
from collections.abc import Iterator
from typing import Any

from finetune.config.rules.tasks import WITHOUT_TOKENS
from finetune.config.run_config import RunConfig
from finetune.config.source import joined
from finetune.config.wording import did_you_mean, listed
from finetune.errors import Problem

TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")


MOST_LAYERS = 2_000
"""Building a layer takes a few milliseconds."""

_TOO_LARGE = 1 << 63

ADAPTERS = ("lora", "ia3", "oft", "prompt_tuning", "prefix_tuning", "adapter")
"""Keys of `model` that train something beside the model's own weights."""

MERGEABLE = ("lora", "ia3", "oft", "adapter")
"""Of these, which can be folded into the weights."""


def adapter_of(config: RunConfig) -> str | None:
    """Return which kind of adapters is written; None where the model's own weights learn."""
    return next((name for name in ADAPTERS if getattr(config.model, name) is not None), None)


def learning_dtypes(config: RunConfig) -> frozenset[str]:
    """Return the types of weights that learn; adapters are float32, modules that are saved beside them are not."""
    if adapter_of(config) is None:
        return frozenset({config.model.dtype})
    lora = config.model.lora
    return frozenset({"float32", *([config.model.dtype] if lora and lora.modules_to_save else [])})


def adapters_are_one_kind(config: RunConfig) -> Iterator[Problem]:
    """At most one kind of adapters is trained."""
    written = [name for name in ADAPTERS if getattr(config.model, name) is not None]
    for name in written[1:]:
        yield Problem(f"model.{name}", f"there are adapters in `model.{written[0]}` already. Write only one of them.")


def quantized_weights_are_frozen(config: RunConfig) -> Iterator[Problem]:
    """Weights in few bits cannot learn."""
    if config.model.quantization is not None and adapter_of(config) is None:
        message = "weights in few bits cannot learn. Write `model.lora` too, or remove it."
        yield Problem("model.quantization", message)


def compiled_forward_is_pure(config: RunConfig) -> Iterator[Problem]:
    """What is compiled remembers nothing from one batch to the next."""
    if config.model.compile == "full" and config.train.embedding_noise:
        message = "noise is added to the embeddings from outside, which `full` would compile, too. Write `regional`."
        yield Problem("model.compile", message)
    if config.model.compile != "off" and isinstance(config.model.batch_norm, int):
        message = "batch norms over groups of samples keep sums from batch to batch. Write `off`, or `frozen` ones."
        yield Problem("model.compile", message)


def model_is_one(config: RunConfig) -> Iterator[Problem]:
    """The model comes from exactly one place."""
    has_name, has_config = config.model.name is not None, config.model.from_config is not None
    if has_name and has_config:
        yield Problem("model.from_config", "the model is in `model.name` already. Write only one of them.")
    if not has_name and not has_config:
        yield Problem(
            "model", "there is no model. Write `name` (hub name or folder) or `from_config` (random weights)."
        )


def tokenizer_is_one(config: RunConfig) -> Iterator[Problem]:
    """A tokenizer comes from exactly one place, and a model made from a config brings none."""
    tokenizer = config.model.tokenizer
    if tokenizer is None:
        if config.model.from_config is not None and config.task.name not in WITHOUT_TOKENS:
            message = (
                "a model made from its config brings no tokenizer. Write `model.tokenizer` with `name` or `train`."
            )
            yield Problem("model.from_config", message)
    elif tokenizer.name is not None and tokenizer.train is not None:
        message = "the tokenizer is in `model.tokenizer.name` already. Write only one of them."
        yield Problem("model.tokenizer.train", message)
    elif tokenizer.name is None and tokenizer.train is None:
        yield Problem("model.tokenizer", "there is no tokenizer. Write `name` or `train`.")


def trackers_are_known(config: RunConfig) -> Iterator[Problem]:
    """Trackers are among those that Accelerate knows."""
    for index, name in enumerate(config.report.trackers):
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS) or f"There are {listed(TRACKERS)}."
            yield Problem(f"report.trackers.{index}", f"there is no tracker `{name}`. {hint}")


def values_are_of_64_bits(config: RunConfig) -> Iterator[Problem]:
    """Numbers in the values of a model's config fit into 64 bits; layers can be counted, dropout is a share."""
    written = config.model.from_config
    for key, number in _numbers(written.values if written else {}, key="model.from_config.values"):
        if isinstance(number, float) and math.isnan(number):
            yield Problem(key, "this is not a number. Write one.")
        elif isinstance(number, int) and abs(number) >= _TOO_LARGE:
            yield Problem(key, f"{number} does not fit into 64 bits. Write a smaller number.")
        elif "dropout" in key.rpartition(".")[2] and not 0 <= number <= 1:
            yield Problem(key, f"{number:g} is no share. Write a number from 0 to 1.")
        elif isinstance(number, int) and "layer" in key.rpartition(".")[2] and number > MOST_LAYERS:
            yield Problem(key, f"{number:,} layers are more than can be built. Write at most {MOST_LAYERS:,}.")


def _numbers(value: Any, *, key: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, key=joined(key, name))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value


MODEL_RULES = (
    values_are_of_64_bits,
    model_is_one,
    tokenizer_is_one,
    adapters_are_one_kind,
    quantized_weights_are_frozen,
    compiled_forward_is_pure,
    trackers_are_known,
)
