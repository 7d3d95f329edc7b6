"""Which weights have to be written: those of the plain model, built on the meta device, however training wrapped it.

Checked before writing against the meta model, and after it against what was given.
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from finetune.errors import TrainingError
from finetune.model.adapters.context import has_adapter

ADAPTER_NAME = "default"


def build_meta_model(model: PreTrainedModel, *, dtype: torch.dtype, is_untied: bool = False) -> PreTrainedModel:
    """Return a model of the same class and config whose parameters have shapes and no memory.

    Wrapping leaves the trained model with empty, flattened or renamed parameters (ZeRO-3, FSDP1) or another class
    (FSDP2); the skeleton's names, shapes and ties are those that `from_pretrained` will look for. With `is_untied` its
    output embeddings are weights of their own, and its config says so.
    """
    config = copy.deepcopy(model.config)
    config.use_cache = True  # off only while training
    if is_untied:
        for each in (config, config.get_text_config(decoder=True)):
            each.tie_word_embeddings = False
    if hasattr(config, "quantization_config"):  # it is about a base in few bits, and what is written has all of them
        del config.quantization_config
    with torch.device("meta"), set_zero3_state():  # else the parts of a model of parts speak to the other ranks
        skeleton = _transformers_class(model)(config)
    skeleton.to(dtype)
    skeleton.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    if hasattr(model, "_weight_conversions"):  # how the checkpoint's names differ from the model's; undone on saving
        skeleton._weight_conversions = model._weight_conversions
    return skeleton


def unwrap_adapter(model: Any) -> PreTrainedModel:
    """Return the transformers model itself, from under its adapters where it has some."""
    return model.get_base_model() if has_adapter(model) else model


def _transformers_class(model: PreTrainedModel) -> Any:
    """Return the class as transformers defines it: FSDP2 puts one of its own before it."""
    classes = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel)]
    return next(kind for kind in classes if not any("fsdp" in base.__module__ for base in kind.__mro__))


def complete_weights(skeleton: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights to be written, one for each set of tied ones, under the name that loading looks for.

    Raises TrainingError where one is missing, has another shape or no elements, or where tied weights have parted.
    """
    ignored = set(getattr(skeleton, "_keys_to_ignore_on_save", None) or ())
    places = {name: place for name, place in skeleton.state_dict(keep_vars=True).items() if name not in ignored}
    tied = set(getattr(skeleton, "all_tied_weights_keys", ()))
    groups: dict[int, list[str]] = {}
    for name, place in places.items():
        groups.setdefault(id(place), []).append(name)
    complete: dict[str, Tensor] = {}
    missing: list[str] = []
    for names in groups.values():
        main = next((name for name in names if name not in tied), names[0])
        given = [weights[name] for name in names if name in weights]
        if not given:
            missing.append(main)
            continue
        _check_still_tied(names, given)
        complete[main] = given[0]
    _refuse_missing(missing, num_expected=len(groups))
    check_shapes(complete, {name: places[name].shape for name in complete})
    return complete


def check_shapes(weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Raise TrainingError unless every expected weight is there, with its shape and at least one element."""
    _refuse_missing([name for name in shapes if name not in weights], num_expected=len(shapes))
    for name, shape in shapes.items():
        if weights[name].shape != shape or weights[name].numel() == 0:
            raise TrainingError(
                f"export: `{name}` has the shape {tuple(weights[name].shape)} instead of {tuple(shape)}: its parts "
                "were not gathered. Nothing was written; the checkpoints are untouched."
            )


def check_files(folder: Path, weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Reopen every file of weights and return (tensors, bytes); raises TrainingError unless all of them are there.

    Where transformers renames, splits or joins tensors on saving, the number of elements has to be the same.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(_shapes_in(path))
    if not found or any(0 in shape for shape in found.values()):
        raise TrainingError(f"export: what was written to {folder} holds no weights, or empty ones.")
    written = sum(torch.Size(shape).numel() for shape in found.values())
    given = sum(tensor.numel() for tensor in weights.values())
    wrong = [name for name in found.keys() & weights.keys() if found[name] != tuple(weights[name].shape)]
    if written != given or wrong:
        raise TrainingError(
            f"export: what was written to {folder} has {written:,} elements instead of {given:,}"
            + (f", and other shapes in {', '.join(sorted(wrong)[:3])}." if wrong else ".")
        )
    return len(found), sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError) as error:
        raise TrainingError(f"export: {path} was written and cannot be read: {error}.") from error


def _check_still_tied(names: list[str], given: list[Tensor]) -> None:
    if any(other is not given[0] and not torch.equal(given[0], other) for other in given[1:]):
        raise TrainingError(f"export: {' and '.join(names)} are one weight in the config and have parted in training.")


def _refuse_missing(missing: list[str], *, num_expected: int) -> None:
    if missing:
        raise TrainingError(
            f"export: {len(missing)} of {num_expected} weights are missing, the first is `{missing[0]}`. "
            "Nothing was written; the checkpoints are untouched."
        )
