"""What a job computes, reads and writes, from its config and the shapes of its model; nothing is downloaded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.commands.doctor.facts.launch import HubName, JobFacts
from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection
from finetune.config.sections.model import LoraSection
from finetune.data.token_cache.cache import cache_folder
from finetune.model.adapters.context import adapter_config
from finetune.model.loading.dry_run import meta_model
from finetune.model.loading.hub import is_local_path
from finetune.model.size import measure_model, optimizer_state_bytes
from finetune.registry.tasks import TASKS
from finetune.runtime.distributed import error_text
from finetune.runtime.upstream import without_hub_retries

_ADAPTER_SHARE = 200
"""Of adapters other than LoRA, at most one number in so many of the model is taken to be trained."""

_UNLIMITED_LENGTH = 2048
"""Tokens of a sample where the job has no `data.max_length`."""


def gather_job(loaded: LoadedConfig) -> JobFacts:
    """Return the facts of a job; where its model cannot be built here, `problem` has the reason."""
    config, names = loaded.config, tuple(hub_names(loaded.config))
    facts = JobFacts(loaded.path.name, names=names, cache_bytes=_text_bytes(config), **_batch(config))
    facts = replace(facts, written_bytes=_size(Path(config.run.folder)))
    missing = next((each for each in names if each.key == "model.name" and not each.is_cached), None)
    if missing is not None:
        return replace(facts, problem=f"the model {missing.name} is not in the local cache, so its size is unknown")
    try:
        with without_hub_retries(is_local=True):
            model = meta_model(config.model, head=TASKS[config.task.name].head)
    except Exception as error:  # of any library: `finetune check --model` explains it
        return replace(facts, problem=f"the model cannot be built: {error_text(error).splitlines()[0]}")
    return replace(facts, **_sizes(config, model))


def _batch(config: RunConfig) -> dict[str, Any]:
    train, longest = config.train, config.data.max_length or _UNLIMITED_LENGTH
    budget = config.data.batching.tokens or longest
    return {
        "global_batch_size": train.global_batch_size,
        "microbatch_size": train.microbatch_size,
        "tokens_per_step": train.global_batch_size * (longest if config.data.batching.by == "samples" else budget),
        "item_bytes": 4 if train.precision == "fp32" and config.model.dtype == "float32" else 2,
        "gradient_bytes": 4 if config.model.dtype == "float32" or config.model.lora is not None else 2,
        "num_checkpoints": _num_checkpoints(config),
    }


def _num_checkpoints(config: RunConfig) -> int:
    """Return how many checkpoints exist at the same time: those that are kept, and the one that is being written."""
    section, steps = config.checkpoint, config.train.steps
    if section.every_steps is None or (steps is not None and steps <= section.every_steps):
        return 1
    best = 0 if section.keep_best is None else section.keep_best.count
    every = steps // section.keep_every_steps if steps is not None and section.keep_every_steps else 0
    kept = section.keep_last + best + every + 1
    return kept if steps is None else min(kept, -(-steps // section.every_steps))


def _sizes(config: RunConfig, model: nn.Module) -> dict[str, Any]:
    size, adapter = measure_model(model), adapter_config(config.model)
    trained, weights = size.num_parameters, sum(size.bytes_by_dtype.values())
    if isinstance(adapter, LoraSection):
        trained = lora_parameters(model, adapter)
    elif adapter is not None:
        trained = size.num_parameters // _ADAPTER_SHARE
    trained_bytes = 4 * trained if adapter is not None else weights
    optimizer = config.train.optimizer
    state = optimizer_state_bytes(
        optimizer.name, optimizer.state_dtype, num_trained=trained, trained_bytes=trained_bytes
    )
    return {
        "num_parameters": size.num_parameters,
        "num_trained": trained,
        "checkpoint_bytes": trained_bytes + state + (4 * trained if config.train.average else 0),
        "final_bytes": trained_bytes,
    }


def lora_parameters(model: Any, section: LoraSection) -> int:
    """Return the numbers in the LoRA matrices of the linear layers that the section names."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    targets: Sequence[str] = () if isinstance(section.target_modules, str) else section.target_modules
    chosen = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and (not targets or name.split(".")[-1] in targets or name.endswith(tuple(f".{each}" for each in targets)))
    ]
    return sum(section.rank * sum(module.weight.shape) for module in chosen)


def hub_names(config: RunConfig) -> Iterator[HubName]:
    """Yield the models, tokenizers and datasets that come from the hub, and whether they are in the local cache."""
    tokenizer = config.model.tokenizer
    models = {"model.name": config.model.name, "model.tokenizer.name": tokenizer.name if tokenizer else None}
    for key, name in models.items():
        if name is not None and not is_local_path(name):
            yield HubName(key, name, _is_cached("models", name))
    for key, source in _sources(config):
        if source.name is not None and not is_local_path(source.name):
            yield HubName(f"{key}.name", source.name, _is_cached("datasets", source.name))


def _sources(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    yield "data.train", config.data.train
    for number, source in enumerate(config.data.train.mix):
        yield f"data.train.mix.{number}", source
    if config.data.validation is not None:
        yield "data.validation", config.data.validation


def _is_cached(kind: str, name: str) -> bool:
    folder = Path(constants.HF_HUB_CACHE, f"{kind}--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())


def _text_bytes(config: RunConfig) -> int:
    """Return about what the prepared rows take: a token of 4 bytes has about 4 letters, so as much as the text."""
    paths = [Path(source.path).absolute() for _, source in _sources(config) if source.path is not None]
    return sum(_size(file) for path in paths for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) if path.is_dir() else 0


def places_of(config: RunConfig) -> dict[str, Path]:
    """Return the folders that a job writes to."""
    return {"cache": cache_folder(config.data), "run": Path(config.run.folder)}
