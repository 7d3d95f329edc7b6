"""peft's methods beside LoRA: IA3 (learned scales), OFT (rotations), prompt tuning and prefix tuning."""

import torch
from peft import IA3Config, OFTConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig
from peft.tuners.oft import OFTLayer
from torch import Tensor
from transformers import PreTrainedModel

from finetune.config.sections.model import Ia3Section, OftSection, PrefixTuningSection, PromptTuningSection
from finetune.errors import ModelError
from finetune.model.adapters.context import ADAPTER_NAME, TASK_TYPES, AdapterContext, check_module_names, is_conv1d
from finetune.model.freeze import peft_exclude_pattern
from finetune.model.loading.architecture import new_head_modules
from finetune.runtime.seeds import derive_seed


def ia3_config(model: PreTrainedModel, ia3: Ia3Section, context: AdapterContext) -> IA3Config:
    """Return peft's config; raises ModelError for a module that the model does not have."""
    check_module_names(model, ia3.target_modules, key="model.ia3.target_modules")
    is_written = bool(ia3.target_modules)
    return IA3Config(
        target_modules=list(ia3.target_modules) if is_written else None,
        feedforward_modules=list(ia3.feedforward_modules) if is_written else None,
        modules_to_save=list(new_head_modules(model, head=context.head)) or None,
        fan_in_fan_out=any(map(is_conv1d, model.modules())),
        task_type=TASK_TYPES.get(context.head),
    )


def oft_config(model: PreTrainedModel, oft: OftSection, context: AdapterContext) -> OFTConfig:
    """Return peft's config; raises ModelError for a module that the model does not have."""
    if not isinstance(oft.target_modules, str):
        check_module_names(model, oft.target_modules, key="model.oft.target_modules")
    return OFTConfig(
        r=0,
        oft_block_size=oft.block_size,
        module_dropout=oft.dropout,
        target_modules=oft.target_modules if isinstance(oft.target_modules, str) else list(oft.target_modules),
        exclude_modules=peft_exclude_pattern(model),
        modules_to_save=list(new_head_modules(model, head=context.head)) or None,
        bias="none",
        task_type=TASK_TYPES.get(context.head),
    )


def check_oft(model: PeftModel, oft: OftSection) -> None:
    """Raise ModelError for a block size that does not divide a layer's inputs: peft would use another one."""
    for name, module in model.named_modules():
        if isinstance(module, OFTLayer) and module.oft_block_size[ADAPTER_NAME] != oft.block_size:
            raise ModelError(
                f"model.oft.block_size: blocks of {oft.block_size} do not divide the {module.in_features} inputs of "
                f"`{name.removeprefix('base_model.model.')}`. Write a divisor, such as "
                f"{module.oft_block_size[ADAPTER_NAME]}, or fewer `model.oft.target_modules`."
            )


_PROMPT_HEADS = ("causal_lm", "seq2seq_lm")
"""Heads that read every position: others read the first or last one, which would be a learned token."""


def prompt_config(model: PreTrainedModel, prompt: PromptTuningSection, context: AdapterContext) -> PromptTuningConfig:
    """Return peft's config, without peft's initialization; raises ModelError for a head that does not support it."""
    return PromptTuningConfig(
        task_type=_task_type(context, key="model.prompt_tuning"),
        num_virtual_tokens=prompt.num_tokens,
        num_transformer_submodules=1,  # only an encoder's input gets learned tokens
        prompt_tuning_init="RANDOM",
    )


def prefix_config(model: PreTrainedModel, prefix: PrefixTuningSection, context: AdapterContext) -> PrefixTuningConfig:
    """Return peft's config; raises ModelError for a head that does not support it."""
    return PrefixTuningConfig(
        task_type=_task_type(context, key="model.prefix_tuning"),
        num_virtual_tokens=prefix.num_tokens,
    )


def init_prompt(model: PeftModel, prompt: PromptTuningSection, context: AdapterContext) -> None:
    """Initialize from the embeddings of `init_text`, repeated as needed, or of tokens drawn from the seed."""
    learned = model.prompt_encoder[ADAPTER_NAME].embedding.weight  # [tokens, width]
    embeddings = model.get_base_model().get_input_embeddings()
    ids = _init_token_ids(prompt, context)
    with torch.no_grad(), context.init_context.gather([embeddings.weight]):
        if not context.init_context.on_meta_device:
            learned.copy_(embeddings.weight[ids].to(learned))


def init_prefix(model: PeftModel, context: AdapterContext) -> None:
    """Initialize keys and values from the seed with a normal distribution, as peft does."""
    learned = model.prompt_encoder[ADAPTER_NAME].embedding.weight  # [tokens, 2 x layers x width]
    generator = torch.Generator().manual_seed(derive_seed(context.seed, "adapters", "prefix"))
    with torch.no_grad():
        learned.copy_(torch.randn(learned.shape, generator=generator))


def _init_token_ids(prompt: PromptTuningSection, context: AdapterContext) -> Tensor:
    if prompt.init_text is None:
        generator = torch.Generator().manual_seed(derive_seed(context.seed, "adapters", "prompt"))
        return torch.randint(len(context.tokenizer), (prompt.num_tokens,), generator=generator)
    ids = torch.tensor(context.tokenizer(prompt.init_text, add_special_tokens=False)["input_ids"], dtype=torch.long)
    if not len(ids):
        raise ModelError("model.prompt_tuning.init_text: the text has no tokens. Write some words, or remove it.")
    return ids.repeat(-(-prompt.num_tokens // len(ids)))[: prompt.num_tokens]


def _task_type(context: AdapterContext, *, key: str) -> str:
    kind = TASK_TYPES.get(context.head)
    if kind is None or context.head not in _PROMPT_HEADS or context.tokenizer is None:
        raise ModelError(f"{key}: models with the head `{context.head}` do not support it. Write `model.lora` instead.")
    return kind
