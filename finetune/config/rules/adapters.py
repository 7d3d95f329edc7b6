"""Rules of what learns beside a frozen base: adapters, bases in few bits, and new tokens."""

from collections.abc import Iterator

from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.config.sections.task import TaskName
from finetune.config.wording import listed
from finetune.errors import Problem

PROMPTS = ("prompt_tuning", "prefix_tuning")
"""Adapters that stand before the text."""

PROMPTED: tuple[TaskName, ...] = ("sft", "pretrain", "preference", "seq2seq")
"""Tasks whose models can have something before the text: heads that pick one position would pick a wrong one."""

OF_THE_BASE = ("pissa", "olora")


def prompts_fit(config: RunConfig) -> Iterator[Problem]:
    """What is learnt before the text stands before each sample, in a model that predicts tokens."""
    kind, batching = adapter_of(config), config.data.batching
    if kind not in PROMPTS:
        return
    if config.task.name not in PROMPTED:
        message = f"only {listed(PROMPTED)} have a text to stand before. Write `model.lora`."
        yield Problem(f"model.{kind}", message)
    if batching.by == "packs" or batching.padding_free is True:
        key = "by" if batching.by == "packs" else "padding_free"
        message = "samples that share a row share what is learnt before it. Write `data.batching.by: samples`."
        yield Problem(f"data.batching.{key}", message)
    if kind == "prefix_tuning" and config.model.gradient_checkpointing:
        message = "learnt keys and values are a cache, which recomputed layers do not read. Write `false`."
        yield Problem("model.gradient_checkpointing", message)
    if config.task.name == "seq2seq" and config.evaluate is not None and config.evaluate.generate is not None:
        message = f"an encoder is asked without `model.{kind}` when answers are written. Leave `generate` out."
        yield Problem("evaluate.generate", message)


def first_values_fit(config: RunConfig) -> Iterator[Problem]:
    """First values out of the base's weights need weights that can be taken apart and put together exactly."""
    lora, quantization = config.model.lora, config.model.quantization
    if lora is None:
        return
    if lora.init in OF_THE_BASE:
        altered = f"`{lora.init}` alters the base's weights, which"
        if quantization is not None:
            yield Problem("model.lora.init", f"{altered} are in few bits. Write `loftq`, or `default`.")
        if config.model.dtype != "float32":
            yield Problem("model.lora.init", f"{altered} `{config.model.dtype}` would round. Write `dtype: float32`.")
        if lora.dora:
            yield Problem("model.lora.dora", f"{altered} DoRA's magnitudes are of. Write `init: default`.")
    if lora.init == "loftq" and (quantization is None or quantization.method != "bitsandbytes"):
        message = "there is nothing to make up for. Write `model.quantization` (bitsandbytes) too, or `init: default`."
        yield Problem("model.lora.init", message)
    if lora.init == "loftq" and lora.dora:
        yield Problem("model.lora.dora", "its magnitudes are of the adapters before `loftq`. Write `init: default`.")


def quantized_base_is_loaded(config: RunConfig) -> Iterator[Problem]:
    """Only weights that exist are put into few bits; torchao has a few kinds of adapters, and 16-bit arithmetic."""
    quantization, kind = config.model.quantization, adapter_of(config)
    if quantization is None:
        return
    if config.model.from_config is not None:
        yield Problem("model.quantization", "random weights gain nothing from few bits. Write `model.name`.")
    if quantization.method == "torchao" and quantization.bits == 4:
        message = "torchao's 4-bit kernels do not run on every device. Write `bits: 8`, or `method: bitsandbytes`."
        yield Problem("model.quantization.bits", message)
    if quantization.method == "torchao" and kind is not None and kind not in ("lora", "adapter", *PROMPTS):
        yield Problem(f"model.{kind}", "peft has no such adapters on weights of torchao. Write `model.lora`.")


def scaled_modules_are_targets(config: RunConfig) -> Iterator[Problem]:
    """IA3 scales the inputs of modules that it scales at all."""
    ia3 = config.model.ia3
    if ia3 is None:
        return
    for name in ia3.feedforward_modules:
        if name not in ia3.target_modules:
            message = f"`{name}` is not in `model.ia3.target_modules`. Write it there, too."
            yield Problem("model.ia3.feedforward_modules", message)


def new_tokens_learn(config: RunConfig) -> Iterator[Problem]:
    """New tokens have rows that learn: all weights do, or LoRA trains these rows beside its adapters."""
    section, kind = config.model.new_tokens, adapter_of(config)
    if section is None:
        return
    if not section.tokens and not section.special:
        yield Problem("model.new_tokens", "there are none. Write `tokens` or `special`, or remove it.")
    if kind not in (None, "lora"):
        message = f"their embeddings would never learn beside `model.{kind}`. Write `model.lora`, or train all weights."
        yield Problem("model.new_tokens", message)


ADAPTER_RULES = (
    prompts_fit,
    first_values_fit,
    quantized_base_is_loaded,
    scaled_modules_are_targets,
    new_tokens_learn,
)
