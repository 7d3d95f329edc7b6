"""The sizes of a job's computation and files, from its config and its model on the meta device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from torch import nn
from transformers.pytorch_utils import Conv1D

from finetune.config.load import LoadedConfig
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection
from finetune.config.sections.model import LoraSection
from finetune.model.adapters.context import adapter_config
from finetune.model.loading.dry_run import meta_model
from finetune.model.loading.hub import is_local_path
from finetune.model.size import measure_model, optimizer_state_bytes
from finetune.registry.tasks import TASKS
from finetune.runtime.distributed import error_text
from finetune.runtime.upstream import without_hub_retries


@dataclass(frozen=True)
class HubName:
    """A model, tokenizer or dataset of the job that comes from the hub."""

    key: str
    name: str
    is_cached: bool


@dataclass(frozen=True)
class JobFacts:
    """The sizes of a job."""

    file: str
    num_parameters: int = 0
    num_trained: int = 0
    item_bytes: int = 4  # of a number in the forward pass
    gradient_bytes: int = 4  # of a number of the gradients
    global_batch_size: int = 1
    microbatch_size: int = 1
    tokens_per_step: int = 0  # at most
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0  # existing at the same time
    final_bytes: int = 0
    written_bytes: int = 0  # in the run folder, by an earlier run of the job
    cache_bytes: int = 0
    names: tuple[HubName, ...] = ()
    problem: str | None = None  # the reason why the model could not be built


_ADAPTER_SHARE = 200
"""Adapters other than LoRA are assumed to train at most one in this number of the model's parameters."""

_UNLIMITED_LENGTH = 2048
"""Tokens of a sample where the job has no `data.max_length`."""


def gather_job(loaded: LoadedConfig) -> JobFacts:
    """Return the facts of a job; if its model cannot be built here, `problem` has the reason."""
    config = loaded.config
    max_length = config.data.max_length or _UNLIMITED_LENGTH
    row_tokens = max_length if config.data.batching.by == "samples" else config.data.batching.tokens or max_length
    is_float32 = config.model.dtype == "float32"
    sources: dict[str, SourceSection] = {"data.train": config.data.train}
    sources |= {f"data.train.mix.{number}": source for number, source in enumerate(config.data.train.mix)}
    if config.data.validation is not None:
        sources["data.validation"] = config.data.validation
    models = {"model.name": config.model.name, "model.tokenizer.name": getattr(config.model.tokenizer, "name", None)}
    datasets = {f"{key}.name": source.name for key, source in sources.items()}
    names = [
        HubName(key, name, _is_cached(kind, name))
        for kind, own in (("models", models), ("datasets", datasets))
        for key, name in own.items()
        if name is not None and not is_local_path(name)
    ]
    paths = [Path(source.path).absolute() for source in sources.values() if source.path is not None]
    facts = JobFacts(
        loaded.path.name,
        global_batch_size=config.train.global_batch_size,
        microbatch_size=config.train.known_microbatch_size,
        tokens_per_step=config.train.global_batch_size * row_tokens,
        item_bytes=4 if config.train.precision == "fp32" and is_float32 else 2,
        gradient_bytes=4 if is_float32 or config.model.lora is not None else 2,
        num_checkpoints=_num_checkpoints(config),
        names=tuple(names),
        cache_bytes=sum(  # a token has 4 bytes and about 4 letters: as large as the text
            _size(file) for path in paths for file in Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        ),
        written_bytes=_size(Path(config.run.folder)),
    )
    missing = next((name for name in facts.names if name.key == "model.name" and not name.is_cached), None)
    if missing is not None:
        return replace(facts, problem=f"the model {missing.name} is not in the local cache, so its size is unknown")
    try:
        with without_hub_retries(is_local=True):
            model = meta_model(config.model, head=TASKS[config.task.name].head)
    except Exception as error:  # of any library: `finetune check --model` explains it
        return replace(facts, problem=f"the model cannot be built: {error_text(error).splitlines()[0]}")
    size = measure_model(model)
    adapter = adapter_config(config.model)
    trained = size.num_parameters
    if isinstance(adapter, LoraSection):
        trained = lora_parameters(model, adapter)
    elif adapter is not None:
        trained = size.num_parameters // _ADAPTER_SHARE
    trained_bytes = 4 * trained if adapter is not None else sum(size.bytes_by_dtype.values())
    optimizer = config.train.optimizer
    state_bytes = optimizer_state_bytes(
        optimizer.name, optimizer.state_dtype, num_trained=trained, trained_bytes=trained_bytes
    )
    return replace(
        facts,
        num_parameters=size.num_parameters,
        num_trained=trained,
        checkpoint_bytes=trained_bytes + state_bytes + (4 * trained if config.train.average else 0),
        final_bytes=trained_bytes,
    )


def _num_checkpoints(config: RunConfig) -> int:
    """Return the number of checkpoints that exist at the same time, including one being written."""
    section, steps = config.checkpoint, config.train.steps
    if section.every_steps is None or (steps is not None and steps <= section.every_steps):
        return 1
    num_best = 0 if section.keep_best is None else section.keep_best.count
    num_regular = steps // section.keep_every_steps if steps is not None and section.keep_every_steps else 0
    kept = section.keep_last + num_best + num_regular + 1
    return kept if steps is None else min(kept, -(-steps // section.every_steps))


def lora_parameters(model: Any, section: LoraSection) -> int:
    """Return the number of elements in the LoRA matrices of the section's target layers."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    targets: Sequence[str] = () if isinstance(section.target_modules, str) else section.target_modules
    chosen = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not head
        and (not targets or name.split(".")[-1] in targets or name.endswith(tuple(f".{target}" for target in targets)))
    ]
    return sum(section.rank * sum(module.weight.shape) for module in chosen)


def _is_cached(repository_type: str, name: str) -> bool:
    folder = Path(constants.HF_HUB_CACHE, f"{repository_type}--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
