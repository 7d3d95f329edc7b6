"""The weights to write: the weights of the plain model, built on the meta device, however training wrapped it.

They are checked against the meta model before writing, and reread after writing.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from finetune.errors import TrainingError
from finetune.export.upstream import transformers_class, without_zero3_init
from finetune.model.adapters.context import has_adapter
from finetune.runtime.resources import available_bytes, usable_cores

T = TypeVar("T")
R = TypeVar("R")

MAX_THREADS = 16
"""More threads would be limited by memory bandwidth."""


def num_threads_for(item_bytes: int = 0) -> int:
    """Return the number of threads to use: one per core, as far as memory suffices for one item per thread."""
    by_memory = available_bytes() // (2 * item_bytes) if item_bytes else MAX_THREADS
    return max(1, min(usable_cores(), MAX_THREADS, by_memory))


def map_in_threads(work: Callable[[T], R], items: Iterable[T], *, num_threads: int) -> list[R]:
    """Return `work(item)` for every item, in order, without gradients.

    Within an item, torch always computes with one thread, so that the order of every sum is fixed. The first error is
    raised, and items that have not been started by then are skipped.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if num_threads == 1:
            return [_without_gradients(work, item) for item in items]
        with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as threads:
            futures = [threads.submit(_without_gradients, work, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                threads.shutdown(wait=True, cancel_futures=True)
    finally:
        torch.set_num_threads(before)


def _without_gradients(work: Callable[[T], R], item: T) -> R:
    with torch.no_grad():
        return work(item)


def build_meta_model(model: PreTrainedModel, *, dtype: torch.dtype, untie: bool = False) -> PreTrainedModel:
    """Return a model of the same class and config on the meta device: with shapes, without memory.

    Training wraps the model, which leaves empty, flattened or renamed parameters (ZeRO-3) or another class
    (FSDP2). Names, shapes and ties of the meta model are as `from_pretrained` expects. With `untie`, the output
    embeddings are separate weights, also in the config.
    """
    config = copy.deepcopy(model.config)
    config.use_cache = True  # disabled for training only
    if untie:
        for model_config in (config, config.get_text_config(decoder=True)):
            model_config.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):  # the base was quantized, the written weights are not
        del config.quantization_config
    with torch.device("meta"), without_zero3_init():
        meta_model = transformers_class(model)(config)
    meta_model.to(dtype)
    meta_model.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    if hasattr(model, "_weight_conversions"):  # maps the model's names to those in files; used on saving
        meta_model._weight_conversions = model._weight_conversions
    return meta_model


def unwrap_adapter(model: Any) -> PreTrainedModel:
    """Return the transformers model itself, without its adapter if it has one."""
    return model.get_base_model() if has_adapter(model) else model


def complete_weights(meta_model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights to write, one for each set of tied weights, under the name that `from_pretrained` expects.

    Raises TrainingError if one is missing, has another shape or no elements, or if tied weights differ.
    """
    ignored = set(getattr(meta_model, "_keys_to_ignore_on_save", None) or ())
    parameters = {
        name: parameter for name, parameter in meta_model.state_dict(keep_vars=True).items() if name not in ignored
    }
    tied = set(getattr(meta_model, "all_tied_weights_keys", ()))
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    complete: dict[str, Tensor] = {}
    missing: list[str] = []
    for names in groups.values():
        main = next((name for name in names if name not in tied), names[0])
        given = [weights[name] for name in names if name in weights]
        if not given:
            missing.append(main)
            continue
        if any(other is not given[0] and not torch.equal(given[0], other) for other in given[1:]):
            raise TrainingError(f"export: {' and '.join(names)} are tied in the config but have different values.")
        complete[main] = given[0]
    _refuse_missing(missing, num_expected=len(groups))
    check_shapes(complete, {name: parameters[name].shape for name in complete})
    return complete


def check_shapes(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise TrainingError unless every expected weight is given, with its shape and at least one element."""
    _refuse_missing([name for name in shapes if name not in weights], num_expected=len(shapes))
    for name, shape in shapes.items():
        if weights[name].shape != shape or weights[name].numel() == 0:
            raise TrainingError(
                f"export: `{name}` has the shape {tuple(weights[name].shape)} instead of {tuple(shape)}: its shards "
                "were not gathered. Nothing was written; the checkpoints are unchanged."
            )


def check_weight_files(folder: Path, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Reopen every weight file and return (tensors, bytes); raises TrainingError unless all weights are in them.

    Transformers may rename, split or join tensors on saving, but the total number of elements must be the same.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise TrainingError(f"export: rereading {path} failed: {error}.") from error
    if not shapes or any(0 in shape for shape in shapes.values()):
        raise TrainingError(f"export: the files in {folder} contain no weights, or empty ones.")
    num_written = sum(torch.Size(shape).numel() for shape in shapes.values())
    num_given = sum(tensor.numel() for tensor in weights.values())
    wrong = [name for name in shapes.keys() & weights.keys() if shapes[name] != tuple(weights[name].shape)]
    if num_written != num_given or wrong:
        raise TrainingError(
            f"export: the files in {folder} have {num_written:,} elements instead of {num_given:,}"
            + (f", and wrong shapes of {', '.join(sorted(wrong)[:3])}." if wrong else ".")
        )
    return len(shapes), sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _refuse_missing(missing: list[str], *, num_expected: int) -> None:
    if missing:
        raise TrainingError(
            f"export: {len(missing)} of {num_expected} weights are missing, the first is `{missing[0]}`. "
            "Nothing was written; the checkpoints are unchanged."
        )
