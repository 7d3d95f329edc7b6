"""The real architecture on the meta device, and a small copy with the same layer types, ties and switches.

The small model has fewer layers and, if its widths are known to be consistent, narrower ones. It is written to a folder
with all files of the real model except the weights.
"""

import copy
import functools
import shutil
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.commands.rehearse.report import Change
from finetune.commands.rehearse.widths import Values, changed_values, is_count, shrunk_values
from finetune.config.sections.model import FromConfigSection, ModelSection
from finetune.errors import ModelError
from finetune.model.layers import LAYER_COUNTS, MIN_LAYERS, LayerStack, find_stacks
from finetune.model.loading.architecture import HEADS, load_model_config, pretrained_arguments
from finetune.model.loading.config_values import known_names
from finetune.model.loading.dry_run import forward_error, meta_model
from finetune.model.loading.hub import is_local_path, loading_errors
from finetune.model.loading.pretrained import build_from_config

SMALL_PARAMETERS = 3_000_000
"""A model with fewer parameters is not reduced."""

MAX_PARAMETERS = 300_000_000
"""A model that cannot be reduced below this size is refused: a few steps would take too long on a CPU."""

MAX_FILE_BYTES = 256 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt", ".index.json", ".npz")
_DOWNLOADED = ["*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "1_*/*.json", "2_*/*.json"]
_IGNORED_VALUES = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")


@dataclass(frozen=True)
class Architecture:
    """The real model and the small one on the meta device, with the small one's config and its differences."""

    real: PreTrainedModel
    small: PreTrainedModel
    config: PreTrainedConfig
    changes: tuple[Change, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters of the real model."""
        return _num_parameters(self.real)

    @functools.cached_property
    def real_stacks(self) -> tuple[LayerStack, ...]:
        """Return the stacks of layers of the real model."""
        return find_stacks(self.real, with_sizes=False)

    @functools.cached_property
    def small_stacks(self) -> tuple[LayerStack, ...]:
        """Return the stacks of layers of the small model."""
        return find_stacks(self.small, with_sizes=False)


def shrink_architecture(section: ModelSection, *, head: str) -> Architecture:
    """Return the real architecture and the small one; raises ModelError if it cannot be built or reduced."""
    real, config = meta_model(section, head=head), load_model_config(section)
    vars(config).pop("quantization_config", None)  # the small model's weights are plain
    whole = Architecture(real, real, config)
    if whole.num_parameters <= SMALL_PARAMETERS:
        return whole
    values = config.to_dict()
    layers: dict[str, Sequence[int]] = {}  # the kept ones by the part of the config that counts them; "" is the whole
    parts = {name: part for name, part in values.items() if name.endswith("_config") and isinstance(part, dict)}
    for name, part in {"": values, **parts}.items():
        counts = {part[key] for key in LAYER_COUNTS if is_count(part.get(key))}
        counted = [stack for stack in whole.real_stacks if len(stack.kinds) in counts]
        own = [stack for stack in counted if ("vision" in name) == ("vis" in stack.name)] or counted
        if own:
            layers[name] = range(max(num_kept_layers(stack.kinds) for stack in own))
    errors = []
    for level in (0, 1, 2):
        try:
            small = type(config).from_dict(shrunk_values(values, layers=layers, level=level))
            with torch.device("meta"):
                built = build_small(small, section, head=head)
            changes = [
                replace(change, key=f"config.{change.key}")
                for change in changed_values(config.to_dict(), small.to_dict())
                if change.key.rpartition(".")[2] not in _IGNORED_VALUES
            ]
            architecture = Architecture(real, built, small, tuple(changes))
            _check(architecture, section, head=head)
        except Exception as error:  # inconsistent values: libraries raise any error
            lines = str(error).splitlines() or [""]
            errors.append(f"{type(error).__name__}: {lines[0][:200]}")
        else:
            return architecture
    if whole.num_parameters <= MAX_PARAMETERS:
        return whole
    raise ModelError(
        f"model: `{config.model_type}` cannot be reduced ({'; '.join(dict.fromkeys(errors))}). Rehearse the "
        "job with a small model of the same type: --set model.name=FOLDER."
    )


def _num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def num_kept_layers(layer_kinds: Sequence[Hashable]) -> int:
    """Return the length of the shortest prefix with every layer type, at least two.

    >>> num_kept_layers("aaaa"), num_kept_layers("aaab")
    (2, 4)
    """
    firsts = [layer_kinds.index(kind) for kind in set(layer_kinds)]
    return min(max(*firsts, MIN_LAYERS - 1) + 1, len(layer_kinds))


def _check(architecture: Architecture, section: ModelSection, *, head: str) -> None:
    """Raise an error if the small model does not represent the real one, or cannot run."""
    if _num_parameters(architecture.small) > MAX_PARAMETERS:
        raise ModelError("too many parameters remain")
    small = {stack.name: set(stack.kinds) for stack in architecture.small_stacks}
    for stack in architecture.real_stacks:
        if small.get(stack.name, set(stack.kinds)) != set(stack.kinds):
            raise ModelError(f"not every layer type of `{stack.name}` was kept")
    model = build_small(architecture.config, section, head=head)
    model.config.use_cache = False  # as in training
    error = forward_error(model)
    if error is not None:
        raise error


def build_small(config: PreTrainedConfig, section: ModelSection, *, head: str, seed: int = 0) -> PreTrainedModel:
    """Return the small model with random weights, of the class in its config if transformers has it."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        built: PreTrainedModel = build_from_config(
            HEADS[head], copy.deepcopy(config), dtype=torch.float32, trust_remote_code=section.trust_remote_code
        )
    return built.eval()


def from_config_values(section: FromConfigSection, architecture: Architecture) -> Values:
    """Return `model.from_config.values` of the small model, without aliases of the same value."""
    values: Values = {**section.values}
    aliases = {own: alias for alias, own in getattr(architecture.config, "attribute_map", {}).items()}
    for change in architecture.changes:
        *path, name = change.key.removeprefix("config.").split(".")
        owner: Any = architecture.config
        for part_name in path:
            owner = getattr(owner, part_name, None)
        if isinstance(owner, PreTrainedConfig) and name not in known_names(type(owner)):
            continue  # computed from other values, such as `qk_head_dim`
        part = values
        for part_name in path:
            part[part_name] = dict(part.get(part_name) or {})
            part = part[part_name]
        part.pop(aliases.get(name, name), None)
        part[name] = change.now
    return values


def write_model_copy(
    architecture: Architecture, section: ModelSection, *, head: str, folder: Path, seed: int = 0
) -> None:
    """Write the small model and the other files of the real one; raises ModelError if these cannot be loaded."""
    named = (architecture.config.architectures or [""])[0]
    saved_heads = {"ForCausalLM": "causal_lm", "ForMaskedLM": "masked_lm", "LMHeadModel": "causal_lm"}
    head = next((saved for ending, saved in saved_heads.items() if named.endswith(ending)), head)
    build_small(architecture.config, section, head=head, seed=seed).save_pretrained(folder)
    origin = pretrained_arguments(section)
    if is_local_path(str(section.name)):
        source = Path(origin["source"])
    else:
        with loading_errors(str(section.name), key="model.name"):
            source = Path(
                snapshot_download(
                    origin["source"],
                    revision=section.revision,
                    cache_dir=section.cache_folder,
                    allow_patterns=_DOWNLOADED,
                    local_files_only=origin["local_files_only"],
                )
            )
    for path in _small_files(source):
        target = folder / path.relative_to(source)
        if target != folder / "config.json":
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _small_files(folder: Path) -> Iterator[Path]:
    for path in sorted([*folder.glob("*"), *folder.glob("[!.]*/*.json"), *folder.glob("additional_chat_templates/*")]):
        if path.is_file() and not path.name.endswith(WEIGHTS) and path.stat().st_size <= MAX_FILE_BYTES:
            yield path
