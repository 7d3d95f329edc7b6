"""Doors of transformers and torch through which the files of a model run code, and how they are held shut."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin, dynamic_module_utils, modeling_utils
from transformers.integrations import peft as peft_integration
from transformers.models.auto import auto_factory, processing_auto, tokenization_auto

from finetune.errors import ModelError
from finetune.model.model_files import PICKLED, REMOTE_CODE, check_index

dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
"""transformers 5.23 asks on standard input whether it may run code (`resolve_trust_remote_code`) wherever nobody has
said so: where AutoProcessor hands no word on to its parts, where peft loads the tokenizer of a prompt. With 0 seconds
to answer it raises ValueError at once. Holds for the whole process."""

CALLED_BEFORE_CODE_RUNS = ("check_imports", "get_relative_import_files")
"""What transformers 5.17 to 5.23 calls between finding a file of code and its first line, by its own name; who imports
the functions around them by name, such as `generation`, passes through these all the same."""


@contextmanager
def guarded(*, trust_remote_code: bool) -> Iterator[None]:
    """Have files of a model be read as data alone meanwhile; raises ModelError where they would run code.

    Whatever is trusted, refuses an adapter beside a whole model, and an index that names files elsewhere.
    """
    with ExitStack() as stack:
        for owner, name, replacement in replacements(trust_remote_code=trust_remote_code):
            stack.enter_context(patch.object(owner, name, replacement))
        yield


def replacements(*, trust_remote_code: bool) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield each door: the module, the name in it and what stands there meanwhile."""
    for user in (auto_factory, peft_integration):
        yield user, "find_adapter_config_file", _without_adapter(user.find_adapter_config_file)
    yield modeling_utils, "get_checkpoint_shard_files", _checked_index(modeling_utils.get_checkpoint_shard_files)
    for user, name, base in (
        (tokenization_auto, "tokenizer_class_from_name", PreTrainedTokenizerBase),
        (processing_auto, "processor_class_from_name", ProcessorMixin),
    ):
        yield user, name, _of_base(getattr(user, name), base)
    if trust_remote_code:
        return
    for name in CALLED_BEFORE_CODE_RUNS:
        yield dynamic_module_utils, name, _refuse_code
    yield torch, "load", _refuse_pickle


def _refuse_code(*_: Any, **__: Any) -> Any:
    raise ModelError(f"The model cannot be loaded: {REMOTE_CODE}")


def _refuse_pickle(*_: Any, **__: Any) -> Any:
    raise ModelError(f"The model cannot be loaded: {PICKLED}")


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


def _of_base(find: Callable[..., Any], base: type) -> Callable[..., Any]:
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
