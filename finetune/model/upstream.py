"""Every workaround for transformers, torch, Accelerate and peft that this wing needs, and nothing but workarounds.

Three groups: loading, where the files of a model could run code; models without input embeddings, or with names and
ties that sharding strategies cannot work with; and units of FSDP2 that share a parameter.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, dynamic_module_utils, modeling_utils
from transformers.integrations import peft as peft_integration
from transformers.models.auto import auto_factory, processing_auto, tokenization_auto

from finetune.errors import ModelError
from finetune.model.loading.model_files import PICKLE_ADVICE, REMOTE_CODE_ADVICE, check_index


def allow_missing_embeddings(model: PreTrainedModel) -> None:
    """Make a model without embeddings return None: transformers raises, and Accelerate's FSDP2 (1.15) always asks."""
    if input_embeddings(model) is None:
        model.get_input_embeddings = _no_embeddings


def input_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the input embeddings; None where transformers knows of none, as in a ResNet."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def output_embeddings(model: PreTrainedModel) -> Any:
    """Return the output embeddings; None where transformers knows of none."""
    try:
        return model.get_output_embeddings()
    except NotImplementedError:
        return None


def _no_embeddings() -> None:
    return None


dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
"""transformers 5.23 asks on standard input whether it may run code (`resolve_trust_remote_code`) wherever nobody has
said so: where AutoProcessor hands no word on to its parts, where peft loads the tokenizer of a prompt. With 0 seconds
to answer it raises ValueError at once. Holds for the whole process."""

REMOTE_CODE_HOOKS = ("check_imports", "get_relative_import_files")
"""What transformers 5.17 to 5.23 calls between finding a file of code and its first line, by its own name; who imports
the functions around them by name, such as `generation`, passes through these all the same."""


@contextmanager
def data_only_loading(*, trust_remote_code: bool) -> Iterator[None]:
    """Have files of a model be read as data alone meanwhile; raises ModelError where they would run code.

    Whatever is trusted, refuses an adapter beside a whole model, and an index that names files elsewhere.
    """
    with ExitStack() as stack:
        for owner, name, replacement in loading_patches(trust_remote_code=trust_remote_code):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def loading_patches(*, trust_remote_code: bool) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield each door: the module, the name in it and what stands there meanwhile."""
    for user in (auto_factory, peft_integration):
        yield user, "find_adapter_config_file", _without_adapter(user.find_adapter_config_file)
    yield modeling_utils, "get_checkpoint_shard_files", _checked_index(modeling_utils.get_checkpoint_shard_files)
    for user, name, base in (
        (tokenization_auto, "tokenizer_class_from_name", PreTrainedTokenizerBase),
        (processing_auto, "processor_class_from_name", ProcessorMixin),
    ):
        yield user, name, _restricted_to(getattr(user, name), base)
    if trust_remote_code:
        return
    for name in REMOTE_CODE_HOOKS:
        yield dynamic_module_utils, name, _refuse_code
    yield torch, "load", _refuse_pickle


def _refuse_code(*_: Any, **__: Any) -> Any:
    raise ModelError(f"The model cannot be loaded: {REMOTE_CODE_ADVICE}")


def _refuse_pickle(*_: Any, **__: Any) -> Any:
    raise ModelError(f"The model cannot be loaded: {PICKLE_ADVICE}")


def _without_adapter(find: Callable[..., str | None]) -> Callable[..., None]:
    """Return a search for an adapter beside a whole model that raises ModelError where it finds one.

    transformers 5.23 would load it with the model, or instead of this model the one that the adapter names.
    """

    def find_none(model_id: Any, **how: Any) -> None:
        if find(model_id, **how) is not None:
            raise ModelError(
                f"{model_id}: holds an adapter and is named as a whole model. Name the base it was trained on "
                "(`base_model_name_or_path` in its adapter_config.json), or a copy without adapter_config.json."
            )

    return find_none


def _checked_index(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' reader of an index with its names checked: they are joined to the folder as they are."""

    def resolve_checked(model: Any, index: str, *more: Any, **how: Any) -> Any:
        check_index(index)
        return resolve(model, index, *more, **how)

    return resolve_checked


def _restricted_to(find: Callable[..., Any], base: type) -> Callable[..., Any]:
    """Return a search for a class by name that finds nothing but classes of this base.

    transformers 5.23 takes any name of its own: `tokenizer_class: AutoModel` would load a model.
    """

    def find_class(name: Any, *more: Any, **how: Any) -> Any:
        found = find(name, *more, **how)
        if found is None or type(found).__name__ == "DummyObject":  # one that says which package is missing
            return found
        if not (inspect.isclass(found) and issubclass(found, base)):
            raise ModelError(f"The model cannot be loaded: its files name {name!r}, which is no {base.__name__}.")
        return found

    return find_class


@contextmanager
def head_as_one_unit(model: Any) -> Iterator[None]:
    """Have the model name, meanwhile, all of its head as its output embeddings where these share more than the table.

    The bias of BERT's decoder is its head's, too. Accelerate shards the output embeddings as a unit of FSDP2, and torch
    refuses a parameter that stands in two units ("is shared with a parameter already managed by another FSDP group",
    accelerate 1.15, torch 2.13). May go when Accelerate groups all modules that share a parameter. `model` is the one
    inside of adapters.
    """
    decoder = output_embeddings(model)
    head = None if decoder is None else _module_sharing_parameters(model, decoder)
    if head is None:
        yield
        return
    kind: Any = type(head)
    kind.weight = property(lambda _: decoder.weight)  # which Accelerate compares with the table
    model.get_output_embeddings = lambda: head
    try:
        yield
    finally:
        del model.get_output_embeddings, kind.weight


def _module_sharing_parameters(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """Return the module around the decoder that holds one of its parameters as its own; None where none does."""
    own = {id(parameter) for parameter in decoder.parameters()}
    for module in model.modules():
        holds = any(id(parameter) in own for parameter in module.parameters(recurse=False))
        if holds and module is not decoder and any(each is decoder for each in module.modules()):
            return module
    return None


_NO_SPLIT_MODULES = "_no_split_modules"
_HIDDEN_SIZE_NAMES = ("hidden_size", "hidden_sizes")


def keep_own_no_split_modules(model: PreTrainedModel) -> None:
    """Leave the model with those names of whole layers that it has layers of, and that hold no input embeddings.

    Accelerate gives the embeddings to a unit of FSDP2 of their own, together with the head that they are tied to, and
    fails where a layer's unit has them already, as BERT's embeddings layer would (accelerate 1.15).

    A model with a CLIP image encoder names CLIP's text embeddings, too, and Accelerate's FSDP policy refuses a name
    without a layer ("Could not find the transformer layer class", accelerate 1.15 with transformers 5.23). May go when
    either of them leaves such names out.
    """
    embeddings = input_embeddings(model)
    kinds = {
        type(module).__name__
        for module in model.modules()
        if embeddings is None or all(each is not embeddings for each in module.modules())
    }
    names = getattr(model, _NO_SPLIT_MODULES, None) or ()
    own = [name for name in names if name in kinds]
    if own and len(own) < len(names):
        setattr(model, _NO_SPLIT_MODULES, set(own) if isinstance(names, set) else own)


def unify_tied_embeddings(model: PreTrainedModel) -> None:
    """Let modules that are the same table as the input embeddings be that very module.

    Encoder and decoder of a T5 have one each, with one weight. FSDP2 refuses a weight that stands in several of its
    units; a module it finds but once.
    """
    embeddings = input_embeddings(model)
    if embeddings is None:
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is not embeddings and _is_same_table(child, embeddings):
                setattr(parent, name, embeddings)


def _is_same_table(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether two embeddings have one weight and make the same of it."""
    if type(one) is not type(other) or not isinstance(one, nn.Embedding):
        return False
    settings = [
        {name: value for name, value in vars(each).items() if not name.startswith("_")} for each in (one, other)
    ]
    return one.weight is other.weight and settings[0] == settings[1]


@contextmanager
def expose_hidden_size(config: Any) -> Iterator[None]:
    """Have the config tell the width of its text part meanwhile, where it has none of its own.

    Accelerate fills ZeRO-3's `auto` buckets by `config.hidden_size` and refuses a model of images and text, which has
    it in `text_config` (accelerate 1.15). May go when it asks `get_text_config()`.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, _HIDDEN_SIZE_NAMES[0], None)
    if width is None or any(hasattr(config, name) for name in _HIDDEN_SIZE_NAMES):
        yield
        return
    setattr(config, _HIDDEN_SIZE_NAMES[0], width)
    try:
        yield
    finally:
        delattr(config, _HIDDEN_SIZE_NAMES[0])
