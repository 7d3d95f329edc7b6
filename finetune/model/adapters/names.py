"""What peft is told of a model: its word for the head, and names of modules that the model really has."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.errors import ModelError

ADAPTER = "default"
"""Our one adapter's name in peft's models; it is in no file."""

TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "image_text_to_text": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
}
"""What peft calls the heads; others it has no name for."""


def check_each(model: nn.Module, wanted: Sequence[str], *, key: str) -> None:
    """Refuse a name that no module bears in full or at its end; peft itself ignores it when another one matches."""
    names = [name for name, _ in model.named_modules()]
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            near = get_close_matches(target, {name.rpartition(".")[2] for name in names}, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ModelError(f"{key}: no module is called `{target}`.{hint} {candidates_sentence(model)}")


def candidates_sentence(model: nn.Module) -> str:
    """Name the layers that can have an adapter, by the last part of their names."""
    kinds = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
    last_names = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, kinds) or is_transposed(module)
    }
    return f"Modules that can be named: {', '.join(sorted(last_names))}."


def name_of(module: nn.Module | None, model: nn.Module) -> str | None:
    """Return the module's name in the model; None where it is not there."""
    return next((name for name, each in model.named_modules() if each is module), None) if module is not None else None


def is_transposed(module: nn.Module) -> bool:
    """Tell whether this is GPT-2's linear layer, which holds its weight the other way round."""
    return isinstance(module, Conv1D)
