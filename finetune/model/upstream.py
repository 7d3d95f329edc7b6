"""Workarounds of `finetune.model` for transformers, Accelerate, peft and bitsandbytes.

Each workaround names the bug, the version, and when it can be removed. `CHECKED` holds the newest version against which
all of them have been checked; a test per workaround fails as soon as it is no longer needed. Nothing else in this
package patches a library or mutates a third-party class.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    dynamic_module_utils,
    modeling_utils,
)
from transformers.integrations import moe
from transformers.integrations import peft as peft_integration
from transformers.models.auto import auto_factory, processing_auto, tokenization_auto

from finetune.errors import ModelError
from finetune.model.loading.hub import PICKLE_ADVICE, REMOTE_CODE_ADVICE, check_index

CHECKED = {"transformers": (5, 24), "accelerate": (1, 15), "peft": (0, 21), "bitsandbytes": (0, 50), "torch": (2, 14)}

Patch = tuple[Any, str, Any]
"""A module or class, the name of an attribute that it defines, and the replacement."""


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Replace attributes in this context; raises KeyError if an owner does not (or no longer) define the attribute."""
    originals: list[Patch] = []
    try:
        for owner, name, replacement in patches:
            originals.append((owner, name, vars(owner)[name]))
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(originals):
            setattr(owner, name, original)


# Loading: no code from a model's files may run.

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
"""transformers 5.23 prompts on stdin whether to run remote code (`resolve_trust_remote_code`) if its caller does not
pass `trust_remote_code`: AutoProcessor for its parts, peft for the tokenizer of a prompt. With a timeout of 0 it raises
ValueError instead. Applies to the whole process; can be removed when no caller prompts."""

REMOTE_CODE_HOOKS = ("check_imports", "get_relative_import_files")
"""Functions of `dynamic_module_utils` that transformers 5.17 to 5.23 calls between finding and running a file of code,
also for callers that import the functions around them by name, such as `generation`."""


@contextmanager
def data_only_loading(*, trust_remote_code: bool) -> Iterator[None]:
    """Read a model's files as data only; raises ModelError if they would run code.

    Even for trusted files it rejects an adapter inside a full model, and an index with files in other folders. Can be
    removed when transformers has an option that disables remote code, pickles and adapters for everything it loads.
    """
    with patched(loading_patches(trust_remote_code=trust_remote_code)):
        yield


def loading_patches(*, trust_remote_code: bool) -> Iterator[Patch]:
    """Yield the patches of transformers and torch that prevent a model's files from running code."""
    for user in (auto_factory, peft_integration):
        yield user, "find_adapter_config_file", partial(_find_no_adapter, user.find_adapter_config_file)
    resolve = partial(_resolve_checked, modeling_utils.get_checkpoint_shard_files)
    yield modeling_utils, "get_checkpoint_shard_files", resolve
    for user, name, base in (
        (tokenization_auto, "tokenizer_class_from_name", PreTrainedTokenizerBase),
        (processing_auto, "processor_class_from_name", ProcessorMixin),
    ):
        yield user, name, partial(_find_class, getattr(user, name), base)
    if trust_remote_code:
        return
    for name in REMOTE_CODE_HOOKS:
        yield dynamic_module_utils, name, partial(_refuse, REMOTE_CODE_ADVICE)
    yield torch, "load", partial(_refuse, PICKLE_ADVICE)


def _refuse(advice: str, *_: Any, **__: Any) -> None:
    raise ModelError(f"The model cannot be loaded: {advice}")


def _find_no_adapter(find: Callable[..., str | None], model_id: Any, **options: Any) -> None:
    """Search for an adapter in a model's folder as transformers does, and raise ModelError if there is one.

    transformers 5.23 would load it with the model, or load the adapter's base model instead of this model.
    """
    if find(model_id, **options) is not None:
        raise ModelError(
            f"{model_id}: contains an adapter, but is used as a full model. Use the base it was trained on "
            "(`base_model_name_or_path` in its adapter_config.json), or a copy without adapter_config.json."
        )


def _resolve_checked(resolve: Callable[..., Any], model: Any, index: str, *more: Any, **options: Any) -> Any:
    """Read an index of weights as transformers does, which joins its file names to the folder as they are."""
    check_index(index)
    return resolve(model, index, *more, **options)


def _find_class(find: Callable[..., Any], base: type, name: Any, *more: Any, **options: Any) -> Any:
    """Look up a class by name as transformers does, but accept only subclasses of `base`.

    transformers 5.23 accepts all of its class names: `tokenizer_class: AutoModel` would load a model.
    """
    result = find(name, *more, **options)
    if result is None or type(result).__name__ == "DummyObject":  # its error names the missing package
        return result
    if not (inspect.isclass(result) and issubclass(result, base)):
        raise ModelError(f"The model cannot be loaded: its files name {name!r}, which is not a {base.__name__}.")
    return result


# Building.


@contextmanager
def skip_weight_init() -> Iterator[None]:
    """Build models without initializing weights, which `initialize_weights` does later: saves 75% of the time.

    Embeddings and matrices are marked with a NaN, see `initialize_marked`. transformers 5.23 has no public way to build
    from a config without initialization; can be removed when it has one.
    """
    patches: tuple[Patch, ...] = (
        (PreTrainedModel, "initialize_weights", lambda self: None),
        (nn.Linear, "reset_parameters", _mark_uninitialized),
        (nn.Embedding, "reset_parameters", _mark_uninitialized),
    )
    with patched(patches):
        yield


def initialize_marked(module: nn.Module) -> None:
    """Initialize a module as torch does if `skip_weight_init` marked it and the model's init rules skipped it."""
    if not isinstance(module, (nn.Linear, nn.Embedding)) or module.weight.numel() == 0 or module.weight.is_meta:
        return
    if module.weight.view(-1)[0].isnan():
        module.reset_parameters()


@torch.no_grad()
def _mark_uninitialized(module: Any) -> None:
    module.weight.view(-1)[:1].fill_(torch.nan)
    if getattr(module, "bias", None) is not None:
        bound = module.in_features**-0.5
        nn.init.uniform_(module.bias, -bound, bound)


# Sharding: FSDP2 units must not share parameters, and Accelerate reads attributes that not every model has.


def allow_missing_embeddings(model: PreTrainedModel) -> None:
    """Make a model without embeddings return None instead of raising, since Accelerate 1.15 reads them for FSDP2."""
    if input_embeddings(model) is None:
        model.get_input_embeddings = lambda: None


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the input embeddings; None if transformers does not define them, as for a ResNet."""
    try:
        embeddings: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return embeddings


def output_embeddings(model: PreTrainedModel) -> Any:
    """Return the output embeddings; None if transformers does not define them."""
    try:
        return model.get_output_embeddings()
    except NotImplementedError:
        return None


@contextmanager
def head_as_one_unit(model: Any) -> Iterator[None]:
    """Return the whole head as output embeddings in this context if both share more than the embedding matrix.

    BERT's head shares the bias of its decoder. Accelerate 1.15 makes the output embeddings an FSDP2 unit, and torch
    2.13 rejects a parameter in two units ("is shared with a parameter already managed by another FSDP group"). Can be
    removed when Accelerate groups all modules that share a parameter. `model` is not wrapped by adapters.
    """
    decoder, head = output_embeddings(model), None
    own = set() if decoder is None else {id(parameter) for parameter in decoder.parameters()}
    for module in model.modules() if own else ():
        shares = any(id(parameter) in own for parameter in module.parameters(recurse=False))
        if shares and module is not decoder and any(child is decoder for child in module.modules()):
            head = module
            break
    if head is None:
        yield
        return
    head_class: Any = type(head)
    head_class.weight = property(lambda _: decoder.weight)  # Accelerate compares it with the input embeddings
    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings, head_class.weight


def keep_own_no_split_modules(model: PreTrainedModel) -> None:
    """Reduce `_no_split_modules` to layers that exist in the model and do not contain the input embeddings.

    Accelerate makes the embeddings, with the head tied to them, a separate FSDP2 unit, and fails if a layer's unit
    contains them, as BERT's embeddings layer would. A model with a CLIP image encoder also names CLIP's text
    embeddings, and Accelerate rejects a name without a layer ("Could not find the transformer layer class").
    accelerate 1.15, transformers 5.23; can be removed when either omits such names.
    """
    embeddings = input_embeddings(model)
    class_names = {
        type(module).__name__
        for module in model.modules()
        if embeddings is None or all(child is not embeddings for child in module.modules())
    }
    names = getattr(model, "_no_split_modules", None) or ()
    own = [name for name in names if name in class_names]
    if own and len(own) < len(names):
        model._no_split_modules = set(own) if isinstance(names, set) else own


def unify_tied_embeddings(model: PreTrainedModel) -> None:
    """Replace modules that equal the input embeddings and share their weight by the input embeddings.

    transformers 5.23 gives a T5's encoder and decoder separate modules with one shared weight, and FSDP2 rejects a
    weight in two units. Can be removed when T5's decoder uses the encoder's module.
    """
    embeddings = input_embeddings(model)
    if embeddings is None:
        return

    def settings(module: nn.Module) -> dict[str, Any]:
        return {name: value for name, value in vars(module).items() if not name.startswith("_")}

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            is_other = isinstance(child, nn.Embedding) and type(child) is type(embeddings) and child is not embeddings
            if is_other and child.weight is embeddings.weight and settings(child) == settings(embeddings):
                setattr(parent, name, embeddings)


@contextmanager
def expose_hidden_size(config: Any) -> Iterator[None]:
    """Set the config's `hidden_size` to that of its text config in this context, if it has none.

    Accelerate 1.15 computes ZeRO-3's `auto` buckets from `config.hidden_size` and rejects vision-language models,
    whose size is in `text_config`. Can be removed when it uses `get_text_config()`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "hidden_size", None)
    if size is None or any(hasattr(config, name) for name in ("hidden_size", "hidden_sizes")):
        yield
        return
    config.hidden_size = size
    try:
        yield
    finally:
        del config.hidden_size


# Adapters and quantization.


_MATRICES = ({"gate_up_proj", "down_proj"}, {"up_proj", "down_proj"})
"""The matrices of experts whose layout transformers describes by attributes (`use_experts_implementation`)."""


def is_grouped(experts: nn.Module) -> bool:
    """Return whether the model computes these experts as grouped products, and so their adapters."""
    matrices = {name for name, parameter in experts.named_parameters(recurse=False) if not name.endswith("_bias")}
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    is_whole = not getattr(experts, "_is_expert_parallel", True)
    return matrices in _MATRICES and implementation == "grouped_mm" and is_whole


def grouped_product(inputs: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of each group times its matrix: torch's kernel where the machine has it, else a loop.

    Rows up to `ends[0]` are multiplied by `matrices[0]`, [groups, inputs, outputs], and so on. transformers 5.24 knows
    which torch and GPU have the kernel (`_can_use_grouped_mm`), in a private function.
    """
    product: Tensor = moe._grouped_mm(inputs, matrices, ends)
    return product


def _autocast_grouped_mm(own: Callable[..., Tensor], inputs: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
    """Return the grouped product in autocast's dtype, as every other product.

    transformers 5.24 multiplies in the dtype of the matrices, which is float32 unless FSDP2 gathers them in bfloat16:
    other numbers than under FSDP2, and on a GPU no kernel, but a loop that waits for the host. Applies to the whole
    process; can be removed when autocast knows grouped products (pytorch#174763).
    """
    device_type = matrices.device.type
    if torch.is_autocast_enabled(device_type):
        matrices = matrices.to(torch.get_autocast_dtype(device_type))
    return own(inputs, matrices, offs)


moe._grouped_mm = partial(_autocast_grouped_mm, moe._grouped_mm)

GROUPED_KERNEL = (9, 10)
"""Major compute capabilities with one kernel for all groups of a bfloat16 product in torch 2.13."""


def missing_grouped_kernel(device: torch.device, *, precision: str) -> str | None:
    """Return what the kernel for the products of all experts lacks on this device; None if it runs, or on a CPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    if precision not in ("bf16", "fp8"):
        return f"bf16, and train.precision is {precision}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major in GROUPED_KERNEL else f"a GPU of Hopper or Blackwell, and this one is sm_{major}{minor}"


@contextmanager
def adapters_disabled(model: Any) -> Iterator[None]:
    """Disable adapters in this context. peft 0.21's own context manager also resets the adapters' `requires_grad`."""
    switches = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for module in switches:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module in switches:
            module._disable_adapters = False


def disable_cpu_repacking(model: nn.Module) -> None:
    """Make bitsandbytes' 4-bit layers keep their weights as stored.

    On CPUs with bfloat16 instructions, bitsandbytes 0.50 repacks them in place at the first evaluation. FSDP gathers
    weights only temporarily, so its shards stay unpacked and the evaluation is wrong. Can be removed when repacking is
    optional.
    """
    modules: Iterator[Any] = (module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu"))
    for module in modules:
        module.support_avx512bf16_for_cpu = False


def written_head_size(config: PreTrainedConfig, parameters: Mapping[str, Any]) -> dict[str, int]:
    """Return `head_dim` if the config does not set it and the scaling needs it, else an empty dict.

    transformers 5.23 computes `yarn`, `dynamic` and `longrope` with `getattr(config, "head_dim", ...)`, which is None
    in Mixtral and MiniMax (`modeling_rope_utils.py`): TypeError. `linear` and `llama3` fall back to `hidden_size /
    num_attention_heads`, as the models do. It is written into the config, so that the export can be loaded, too.
    """
    layers: list[Mapping[str, Any]] = [value for value in parameters.values() if isinstance(value, dict)]
    needs = any(rope.get("rope_type") in ("yarn", "dynamic", "longrope") for rope in layers or [parameters])
    if not needs or getattr(config, "is_heterogeneous", False) or getattr(config, "head_dim", 0) is not None:
        return {}
    values: Any = config
    return {"head_dim": values.hidden_size // values.num_attention_heads}
