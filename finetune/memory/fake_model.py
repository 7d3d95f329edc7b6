"""A job's model without values: the full model on the meta device, and a few of its layers as fake tensors."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ADAPTER_KEYS, LoraSection, ModelSection, QuantizationSection
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import ModelError
from finetune.memory.state import Method
from finetune.model.adapters.context import AdapterContext, adapter_config
from finetune.model.kernels.fused_layers import are_wanted
from finetune.model.layers import freeze, train_only
from finetune.model.loading.architecture import SpecialTokenIds, config_value_errors, values_key
from finetune.model.loading.load import load_empty_model
from finetune.model.processing import load_processing
from finetune.runtime.optional import lazily, no_op
from finetune.task.protocol import Task

with lazily():
    from finetune.model.adapters import build, single_pass


def with_method(section: ModelSection, method: Method, *, gradient_checkpointing: Any) -> ModelSection:
    """Return the section for this training method; keeps its own adapter and quantization if they fit the method."""
    changed: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
    if method == "full":
        changed |= dict.fromkeys(ADAPTER_KEYS)
        changed["quantization"] = None
    else:
        if adapter_config(section) is None:
            changed |= {"lora": LoraSection(), "freeze": (), "train_only": ()}
        changed["quantization"] = None if method == "lora" else section.quantization or QuantizationSection()
    return section.model_copy(update=changed)


def empty_model(config: RunConfig, section: ModelSection, *, task: Task) -> Any:
    """Return the full model on the meta device, without adapters; raises ModelError.

    If the model's config has no size of the vocabulary, it is that of the tokenizer, the maximum of an untrained one.
    """
    written, tokenizer = config.model.from_config, config.model.tokenizer
    values = {} if written is None else written.values
    vocabulary_size = None
    if written is not None and tokenizer is not None:
        if "vocab_size" in {**values, **(values.get("text_config") or {})}:
            vocabulary_size = None
        elif tokenizer.train is not None:
            vocabulary_size = tokenizer.train.vocabulary_size
        else:
            cache = cache_folder(config.data)
            processing = load_processing(config.model, reads="text", texts=lambda: (), cache_folder=cache, log=no_op)
            vocabulary_size = len(processing.tokenizer)
    name = section.from_config.model_type if section.from_config is not None else str(section.name)
    with config_value_errors(name, key=values_key(section)):
        return load_empty_model(
            section,
            head=task.head,
            vocabulary_size=vocabulary_size,
            special_ids=SpecialTokenIds(bos=0, eos=0, pad=0),
            head_values=task.head_values,
        )


def make_fake_trainable(model: Any, section: ModelSection, *, task: Task, seed: int) -> Any:
    """Return the model with the section's quantization, adapters and frozen parameters."""
    if section.quantization is not None:
        dtype = getattr(torch, section.dtype)
        head = model.get_output_embeddings()  # which no quantization replaces
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and child is not head:
                    setattr(module, name, QuantizedLinear(child, section.quantization, storage=dtype))
    adapter = adapter_config(section)
    if adapter is None:
        freeze(model, section.freeze)
        train_only(model, section.train_only)
        return model
    if section.adapter is not None or section.trains_prompt:
        raise ModelError("model: the memory of a saved adapter or of learned prompts cannot be predicted.")
    if isinstance(adapter, LoraSection):
        adapter = adapter.model_copy(update={"init": "default"})  # does not read the weights' values
    adapted = build.add_adapter(model, adapter, AdapterContext(seed=seed, head=task.head))
    single_pass.use_single_pass(adapted, in_place=section.gradient_checkpointing != "selective")
    return adapted


def materialize_fake(model: nn.Module, *, dtype: torch.dtype | None = None) -> None:
    """Replace parameters and buffers by fake tensors; call it in a FakeTensorMode.

    `dtype` is the dtype of all floating-point parameters if the strategy converts them.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                is_quantized = isinstance(module, QuantizedLinear) and name == "weight"
                is_converted = dtype is not None and parameter.is_floating_point() and not is_quantized
                values = torch.empty(parameter.shape, dtype=dtype if is_converted else parameter.dtype)
                fake = nn.Parameter(values, requires_grad=parameter.requires_grad)
                module._parameters[name] = fakes.setdefault(id(parameter), fake)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


class _Dequantized(torch.autograd.Function):
    """A matrix product whose weight is dequantized in both passes and stays packed in between."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, packed: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.shape, ctx.dtype = shape, inputs.dtype
        return functional.linear(inputs, torch.empty(shape, dtype=inputs.dtype, device=inputs.device))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        weight = torch.empty(ctx.shape, dtype=gradient.dtype, device=gradient.device)
        return gradient @ weight, None, None


class _FusedNorm(torch.autograd.Function):
    """The memory of liger's RMSNorm: it keeps its input and a float32 number per row."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, *_: Any) -> Tensor:
        ctx.save_for_backward(rows, weight, torch.empty(rows.shape[:-1], dtype=torch.float32, device=rows.device))
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, _ = ctx.saved_tensors
        own = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return torch.empty_like(rows), own, None, None, None, None


class _FusedGate(torch.autograd.Function):
    """The memory of liger's gated activations: they keep both inputs, and overwrite them by their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return gate.detach(), up.detach()


FUSED_FUNCTIONS = SimpleNamespace(
    LigerRMSNormFunction=_FusedNorm, LigerSiLUMulFunction=_FusedGate, LigerGELUMulFunction=_FusedGate
)
"""What liger's functions (0.8) keep between forward and backward pass, for `fused_layers.fuse_layers`."""


def runs_fused_layers(section: ModelSection, *, device: str) -> bool:
    """Return whether the job's run uses liger's kernels, as far as this machine's packages tell."""
    compiled = "off" if section.compile == "auto" else section.compile
    return device == "cuda" and are_wanted(section, compiled=compiled)


class QuantizedLinear(nn.Linear):
    """A linear layer with packed weights without values, with the memory of bitsandbytes' layers."""

    def __init__(self, plain: nn.Linear, section: QuantizationSection, *, storage: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.compute_dtype = getattr(torch, section.compute_dtype)
        self.num_values = plain.weight.numel()
        packed_dtype = torch.int8 if section.bits == 8 else storage
        num_packed = -(-self.num_values * section.bits // (8 * torch.empty((), dtype=packed_dtype).element_size()))
        empty = torch.empty(num_packed, 1, dtype=packed_dtype, device="meta")
        self.weight = nn.Parameter(empty, requires_grad=False)
        block_bytes = 0 if section.bits == 8 else (1 if section.double else 4)
        self.register_buffer("scales", torch.empty(self.num_values // 64 * block_bytes, dtype=torch.uint8))
        self.bias = plain.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the product in the dtype of the input."""
        shape = (self.out_features, self.in_features)
        output: Tensor = _Dequantized.apply(input.to(self.compute_dtype), self.weight, shape)  # type: ignore[no-untyped-call]  # torch has no types for it
        return (output if self.bias is None else output + self.bias).to(input.dtype)
