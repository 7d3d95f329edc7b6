"""Writes the trained model: complete, checked, and loadable without this package; and uploads it to the hub."""

import copy
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of whichever client it is built on
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finetune.config.sections.export import ExportSection
from finetune.errors import HubError
from finetune.export.card import CardBase, CardFacts, write_card
from finetune.export.upstream import write_generation_config
from finetune.export.weights import (
    build_meta_model,
    check_weight_files,
    complete_weights,
    map_in_threads,
    num_threads_for,
    unwrap_adapter,
)
from finetune.model.adapters.context import ADAPTER_NAME, has_adapter
from finetune.model.loading.architecture import NEW_HEADS
from finetune.model.loading.saved import CONFIG_FOLDER
from finetune.runtime.files.atomic import replace_folder
from finetune.runtime.optional import lazily
from finetune.runtime.text.redact import redact_known
from finetune.runtime.text.terminal import printable
from finetune.runtime.upstream import is_offline

with lazily():
    from finetune.export import merge as merging

ADAPTER_FILE = "adapter_model.safetensors"
BASE_FOLDER = "base"


@dataclass(frozen=True)
class TextPreprocessor:
    """The tokenizer, and the tokens that end a generated answer."""

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # of the chat template in training


@dataclass(frozen=True)
class Preprocessors:
    """The preprocessors of the model's inputs; `text` is None for images only, `processor` for text only.

    `files` are JSON files for other libraries, by path relative to the model's folder.
    """

    text: TextPreprocessor | None
    processor: Any = None
    files: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write tokenizer, processor and files into the folder, so that libraries load them from there."""
        if self.text is not None:
            self.text.tokenizer.save_pretrained(folder)
        if self.processor is not None:
            self.processor.save_pretrained(folder)
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


REPLACED_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
"""Values of a generation config that an export may change."""


def generation_config(original: GenerationConfig, text: TextPreprocessor) -> GenerationConfig:
    """Return the base's generation config with every token that ends an answer among its EOS tokens.

    Its values stay, even where transformers warns of one. Ids that are not control tokens of this tokenizer, such as
    or from another vocabulary, are replaced by the tokenizer's.
    """
    config, tokenizer = copy.deepcopy(original), text.tokenizer
    control_ids = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    own = config.eos_token_id
    ends = [token for token in (own if isinstance(own, list) else [own]) if token in control_ids]
    ends += sorted(set(text.stop_ids) - set(ends))
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None
    for name in REPLACED_IDS[1:]:
        if getattr(config, name) not in control_ids:
            setattr(config, name, getattr(tokenizer, name))
    return config


@dataclass(frozen=True)
class ExportReport:
    """The written files; `files` maps paths in `folder` to digests, which are None for weights."""

    folder: Path
    files: Mapping[str, str | None]
    num_tensors: int
    size_bytes: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # of the whole model, by its own names
    adapter_tensors: Mapping[str, Tensor] = field(default_factory=dict)  # by peft's names


@dataclass(frozen=True)
class _Written:
    """The tensors of a folder, and the bytes of their files."""

    num_tensors: int
    size_bytes: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    adapter_tensors: Mapping[str, Tensor] = field(default_factory=dict)


def export_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
    facts: CardFacts,
    final: Path | None = None,
) -> ExportReport:
    """Write model or adapter, tokenizer, generation config and card to `folder`, which the caller moves to `final`.

    Only class and config are taken from `model`; the values are `weights`, full CPU tensors by canonical name. If the
    base of an adapter was initialized from a config, it is written to `base/`; `adapter_config.json` then has the
    absolute path of that folder, so after moving `folder` load the base from there first, as the card shows. With
    `export.merge` the adapter is merged into the base, whose weights must be in `weights`, too. Raises TrainingError if
    a weight is missing or empty, before or after writing. Not collective: call it on rank 0 only.
    """
    with replace_folder(folder) as staging:
        if has_adapter(model) and section.merge:
            merged = merging.merge(model, weights, dtype=getattr(torch, section.dtype) if section.dtype else None)
            written = _write_model(
                staging,
                model=unwrap_adapter(model),
                weights=merged.weights,
                preprocessors=preprocessors,
                section=section,
                untie=merged.has_untied_weights,
            )
        elif has_adapter(model):
            weights = _cast(weights, section.dtype)
            written = _write_adapter(
                staging,
                final or folder,
                model=model,
                weights=weights,
                preprocessors=preprocessors,
                section=section,
            )
            base_model = unwrap_adapter(model)
            if _has_own_config(facts, base_model):
                config = copy.deepcopy(base_model.config)
                config.use_cache = True  # disabled for training only
                if facts.config_values and hasattr(config, "quantization_config"):
                    del config.quantization_config  # of training; users of the adapter choose their own
                config.save_pretrained(staging / CONFIG_FOLDER)
        else:
            weights = _cast(weights, section.dtype)
            written = _write_model(staging, model=model, weights=weights, preprocessors=preprocessors, section=section)
        preprocessors.save(staging)
        base = card_base(model, is_merged=section.merge, facts=facts)
        arguments = preprocessors.text.template_arguments if preprocessors.text else {}
        card = write_card(facts, base=base, template_arguments=arguments)
        (staging / "README.md").write_text(printable(card), encoding="utf-8")
        written_files = (path for path in sorted(staging.rglob("*")) if path.is_file())
        files = {str(path.relative_to(staging)): exported_file_digest(path) for path in written_files}
    return ExportReport(folder, files, **vars(written))


def _has_own_config(facts: CardFacts, base: PreTrainedModel) -> bool:
    """Return whether an adapter's folder needs a config because its classes or values differ from the base's."""
    return bool(base.name_or_path) and (facts.head in NEW_HEADS or bool(facts.config_values))


def card_base(model: PreTrainedModel, *, is_merged: bool, facts: CardFacts) -> CardBase | None:
    """Return the model's origin for the card; None if it was initialized with random weights."""
    base = unwrap_adapter(model)
    name = base.name_or_path or None
    if has_adapter(model) and not is_merged:
        # if the adapter contains embedding rows, the base may have fewer of them
        config = model.peft_config[ADAPTER_NAME]
        embeddings = {name for name, module in base.named_modules() if isinstance(module, nn.Embedding)}
        saved = tuple(f".{module}" for module in getattr(config, "modules_to_save", None) or ())
        brings_embeddings = bool(getattr(config, "trainable_token_indices", None)) or any(
            f".{embedding}".endswith(saved) for embedding in embeddings
        )
        size = base.config.get_text_config().vocab_size if brings_embeddings else None
        return CardBase(
            name,
            has_own_config=_has_own_config(facts, base),
            config_values=facts.config_values,
            num_embeddings=size,
        )
    was_merged = has_adapter(model)
    return CardBase(name, "finetune", was_merged=was_merged) if name is not None or was_merged else None


def _write_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
    untie: bool = False,
) -> _Written:
    meta_model = build_meta_model(model, dtype=_dtype(weights), untie=untie)
    complete = complete_weights(meta_model, weights)
    text = preprocessors.text if _generates(model) else None
    if text is not None:
        meta_model.generation_config = GenerationConfig()  # replaced below
    meta_model.save_pretrained(folder, state_dict=dict(complete), max_shard_size=section.max_shard_size)
    if text is not None:
        write_generation_config(generation_config(model.generation_config, text), folder)
    return _Written(*check_weight_files(folder, complete), tensors=complete)


def _generates(model: PreTrainedModel) -> bool:
    """Return whether the model generates text: a classifier has no generation config."""
    return getattr(model, "generation_config", None) is not None and bool(model.can_generate())


def _write_adapter(
    staging: Path,
    folder: Path,
    *,
    model: Any,
    weights: Mapping[str, Tensor],
    preprocessors: Preprocessors,
    section: ExportSection,
) -> _Written:
    adapter, config = merging.adapter_for_export(model, weights, dtype=_dtype(weights))
    base = unwrap_adapter(model)
    config.base_model_name_or_path = base.name_or_path or str(folder.absolute() / BASE_FOLDER)
    save_file(adapter, staging / ADAPTER_FILE, metadata={"format": "pt"})
    config.save_pretrained(staging)
    if _generates(base) and preprocessors.text is not None:
        write_generation_config(generation_config(base.generation_config, preprocessors.text), staging)
    num_tensors, size_bytes = check_weight_files(staging, adapter)
    if base.name_or_path:
        return _Written(num_tensors, size_bytes, adapter_tensors=adapter)
    base_folder = staging / BASE_FOLDER
    base_written = _write_model(
        base_folder,
        model=base,
        weights=merging.base_weights(model, weights),
        preprocessors=preprocessors,
        section=section,
    )
    preprocessors.save(base_folder)
    num_tensors, size_bytes = num_tensors + base_written.num_tensors, size_bytes + base_written.size_bytes
    return _Written(num_tensors, size_bytes, base_written.tensors, adapter)


def _cast(weights: Mapping[str, Tensor], dtype: str | None) -> Mapping[str, Tensor]:
    if dtype is None:
        return weights
    torch_dtype = getattr(torch, dtype)

    def converted(tensor: Tensor) -> Tensor:
        return tensor.to(torch_dtype) if tensor.is_floating_point() else tensor

    return dict(zip(weights, map_in_threads(converted, weights.values(), num_threads=num_threads_for()), strict=True))


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of most elements, which is written to `config.json`."""
    sizes: dict[torch.dtype, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.float32)


def push_folder(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder as one commit and return the repository's URL; the repository is created if it does not exist.

    The token is that of HF_TOKEN or of `hf auth login`. Raises HubError with the remedy; the folder is not changed.
    """
    failed = f"`{repository}` was not uploaded:"
    retry = f"The model is in {folder}. To retry: finetune export {folder} --push-to-hub {repository}"
    if is_offline():
        raise HubError(f"{failed} the hub cannot be reached. {retry}")
    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Upload model")
    except (HTTPError, OSError, ValueError) as error:  # the other errors of the hub are among these
        reason = redact_known(str(error)).strip().partition("\n")[0] or type(error).__name__
        raise HubError(
            f"{failed} {reason.rstrip('.')}. An upload needs a token with write access: HF_TOKEN or `hf auth login`. "
            f"{retry}"
        ) from error
    return str(address)


_MAX_NAMED = 3
_MAX_SHOWN = 80
_NOT_COMPARED = {"architectures", "dtype", "transformers_version", "tie_word_embeddings", "truncation", "padding"}
"""Settings changed by saving, a merge or the tokenizer's last call; ties are verified through the tensors."""


def exported_file_problems(
    folder: Path, digests: Mapping[str, str | None], settings: Mapping[str, str]
) -> Iterator[str]:
    """Yield the problems of the files; `digests` has their digests, `settings` the expected JSON texts, by name."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    changed = [name for name in digests.keys() & paths.keys() if exported_file_digest(paths[name]) != digests[name]]
    for names, problem in (
        (digests.keys() - paths.keys(), "is missing, although the export wrote it"),
        (paths.keys() - digests.keys(), "is in the folder, although the export did not write it"),
        (changed, "has changed since the export wrote it"),
    ):
        yield from (f"{name} {problem}." for name in sorted(names)[:_MAX_NAMED])
    for name in settings.keys() & paths.keys():
        try:
            loaded, expected = _values(paths[name].read_text(encoding="utf-8")), _values(settings[name])
        except (ValueError, AttributeError) as error:
            yield f"{name} is not a JSON object ({error})."
            continue
        wrong = [
            f"`{key}` is {loaded.get(key)} instead of {expected.get(key)}"
            for key in sorted(loaded.keys() | expected.keys())
            if loaded.get(key) != expected.get(key)
        ]
        if wrong:
            yield f"{name}: {', '.join(wrong[:_MAX_NAMED])}."


def exported_file_digest(path: Path) -> str | None:
    """Return a digest of the file; None for weights, whose tensors are compared."""
    return None if path.suffix == ".safetensors" else hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _values(text: str) -> dict[str, str]:
    """Return the values in a JSON file as texts, by key or `key.name`; long ones as their length and digest."""
    flat: dict[str, Any] = {}
    for key, value in json.loads(text).items():
        flat |= {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
    values: dict[str, str] = {}
    for name, value in flat.items():
        if _NOT_COMPARED.isdisjoint(name.split(".")):
            written = json.dumps(value, sort_keys=True)
            digest = hashlib.sha256(written.encode()).hexdigest()[:8]
            values[name] = written if len(written) <= _MAX_SHOWN else f"{len(value)} entries with digest {digest}"
    return values
