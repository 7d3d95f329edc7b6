"""What is said where the loss of predicted tokens cannot be computed as `train.loss_kernel` asks."""

from torch import nn

from finetune.config.sections.train import LossKernel
from finetune.registry.losses import LOSS_KERNELS
from finetune.task.lm_loss.head import LmHead, find_lm_head
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import ModelHead

HEADS_OVER_VOCABULARY: tuple[ModelHead, ...] = ("causal_lm", "seq2seq_lm", "masked_lm", "image_text_to_text")


def fallback_warning(model: nn.Module, model_head: ModelHead, kernel: LossKernel) -> str | None:
    """Return a warning where the loss takes more memory, or another kernel, than was asked for; else None.

    `model` is prepared, `kernel` the one to use (`resolve_kernel`).
    """
    if model_head not in HEADS_OVER_VOCABULARY or kernel == "plain":
        return None
    head, name = find_lm_head(model), type(unwrap_model(model)).__name__
    if head is None or head.transform is None:
        return f"warning: {_asked(kernel)}{_all_logits(head, name)}, which takes more memory"
    if (reason := _kernel_problem(head, kernel)) is not None:
        return f"warning: train.loss_kernel: `{kernel}` does not support {reason}; `chunked` is used"
    if head.is_partitioned and not head.is_linear and list(head.module.parameters()):
        return (
            f"warning: {_asked(kernel)}the head of {name} is not one linear layer (adapters, quantization), and ZeRO-3 "
            "gathers it once: the loss holds the logits of all targets of a microbatch at once, which takes more memory"
        )
    return None


def _asked(kernel: LossKernel) -> str:
    return "" if kernel == "auto" else f"train.loss_kernel: `{kernel}` cannot be used: "


def _all_logits(head: LmHead | None, name: str) -> str:
    if head is None:
        return f"{name} does not say which module is its head: the loss holds the logits of all positions at once"
    positions = "target positions" if head.is_rowwise else "positions"
    return (
        f"{name} changes the output of its head in a way that its config does not name: the loss holds the logits of "
        f"all {positions} of a microbatch at once"
    )


def _kernel_problem(head: LmHead, kernel: LossKernel) -> str | None:
    if LOSS_KERNELS[kernel].module is None:
        return None
    if not head.is_linear:
        return "a head that is not one linear layer (adapters, quantization)"
    has_bias = getattr(head.module, "bias", None) is not None
    return "a head with a bias" if has_bias and not LOSS_KERNELS[kernel].takes_bias else None
