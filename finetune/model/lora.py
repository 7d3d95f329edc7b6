"""LoRA adapters (Hu et al., 2021, arXiv:2106.09685) on a frozen base, through peft."""

from collections.abc import Sequence
from difflib import get_close_matches

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from finetune.config.sections.model import LoraSection
from finetune.errors import ModelError
from finetune.model.heads import head_modules
from finetune.model.hub import summary
from finetune.model.initialize import on_cpu_in_float32
from finetune.runtime.seeds import derive

ADAPTER = "default"
TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "image_text_to_text": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
"""What peft calls the heads; others it has no name for."""


def add_lora(
    model: PreTrainedModel, lora: LoraSection, *, seed: int, revision: str | None = None, head: str = "causal_lm"
) -> PeftModel:
    """Return the model with a frozen base and float32 adapters whose values depend on `seed` and module names alone.

    At first the adapters change nothing: their second factor is zero. `revision` is the base's, recorded for the
    export. Raises ModelError for a target or module that the model does not have.
    """
    _check_names(model, lora)
    try:
        adapted = get_peft_model(model, _peft_config(model, lora, head=head), revision=revision)
    except ValueError as error:
        raise ModelError(f"model.lora: {summary(error)} {_candidates_sentence(model)}") from error
    _draw_adapters(adapted, seed=seed)
    return adapted


def _peft_config(model: PreTrainedModel, lora: LoraSection, *, head: str) -> LoraConfig:
    targets = lora.target_modules
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=[*lora.modules_to_save, *head_modules(model, head=head)] or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        bias="none",
        fan_in_fan_out=any(map(_is_transposed, model.modules())),
        task_type=TASK_TYPES.get(head),
    )


def _draw_adapters(model: PeftModel, *, seed: int) -> None:
    """Draw each adapter from its own seed, so that neither rank nor strategy nor the order of modules matters."""
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                factors = [
                    p for own, p in module.named_parameters() if own.startswith(("lora_A", "lora_B", "lora_emb"))
                ]
                with on_cpu_in_float32(factors):
                    torch.default_generator.manual_seed(derive(seed, "adapters", name))
                    module.reset_lora_parameters(ADAPTER, True)


def _check_names(model: nn.Module, lora: LoraSection) -> None:
    if not isinstance(lora.target_modules, str):
        _check_each(model, lora.target_modules, key="model.lora.target_modules")
    _check_each(model, lora.modules_to_save, key="model.lora.modules_to_save")


def _check_each(model: nn.Module, wanted: Sequence[str], *, key: str) -> None:
    """Refuse a name that no module bears in full or at its end; peft itself ignores it when another one matches."""
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(f"{key}: no module is called `{target}`.{hint} {_candidates_sentence(model)}")


def _candidates_sentence(model: nn.Module) -> str:
    """Name the layers that can have an adapter, by the last part of their names."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    last_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, kinds) or _is_transposed(module)
    }
    return f"Modules that can be named: {', '.join(sorted(last_names))}."


def _is_transposed(module: nn.Module) -> bool:
    """Tell whether this is GPT-2's linear layer, which holds its weight the other way round."""
    return isinstance(module, Conv1D)
