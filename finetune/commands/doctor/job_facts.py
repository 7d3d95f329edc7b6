"""What a job loads from the hub and writes to the disk, from its config and its model on the meta device."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from finetune.config.load import LoadedConfig
from finetune.config.rules.model import adapter_of
from finetune.config.run_config import RunConfig
from finetune.model.loading.dry_run import meta_model
from finetune.model.loading.hub import is_local_path
from finetune.model.size import AVERAGE_BYTES, measure_model, optimizer_state_bytes
from finetune.registry.tasks import TASKS
from finetune.runtime.distributed import error_text
from finetune.runtime.upstream import without_hub_retries


@dataclass(frozen=True)
class HubName:
    """A model, tokenizer or dataset of the job that comes from the hub."""

    key: str
    name: str
    kind: str  # "model" or "dataset"
    is_cached: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.name}"


@dataclass(frozen=True)
class JobFacts:
    """What a job loads and writes; nothing without a job."""

    names: tuple[HubName, ...] = ()
    bytes_to_write: int = 0  # to the run folder: checkpoints and final model, less what an earlier run left there
    problem: str | None = None  # the reason why they are unknown


_ADAPTER_SHARE = 200
"""Adapters are assumed to train at most one in this number of the model's parameters."""


def gather_job(loaded: LoadedConfig) -> JobFacts:
    """Return the facts of a job; if its model cannot be built here, `problem` has the reason."""
    model, data = loaded.config.model, loaded.config.data
    models = {"model.name": model.name, "model.tokenizer.name": getattr(model.tokenizer, "name", None)}
    datasets = {"data.train.name": data.train.name, "data.validation.name": getattr(data.validation, "name", None)}
    datasets |= {f"data.train.mix.{number}.name": source.name for number, source in enumerate(data.train.mix)}
    names = tuple(
        HubName(key, name, kind, _is_cached(kind, name))
        for kind, sources in (("model", models), ("dataset", datasets))
        for key, name in sources.items()
        if name is not None and not is_local_path(name)
    )
    if any(name.key == "model.name" and not name.is_cached for name in names):
        return JobFacts(names, problem=f"the size of {model.name} is unknown: it is not in the local cache")
    try:
        with without_hub_retries(is_local=True):
            return JobFacts(names, bytes_to_write=_bytes_to_write(loaded.config))
    except Exception as error:  # of any library: `finetune check --model` explains it
        return JobFacts(names, problem=f"the model cannot be built: {error_text(error).splitlines()[0]}")


def _bytes_to_write(config: RunConfig) -> int:
    size = measure_model(meta_model(config.model, head=TASKS[config.task.name].head))
    trained, trained_bytes = size.num_parameters, sum(size.bytes_by_dtype.values())
    if adapter_of(config) is not None:
        trained = size.num_parameters // _ADAPTER_SHARE
        trained_bytes = 4 * trained
    optimizer, averages = config.train.optimizer, AVERAGE_BYTES * trained if config.train.average else 0
    state_bytes = optimizer_state_bytes(
        optimizer.name, optimizer.state_dtype, num_trained=trained, trained_bytes=trained_bytes
    )
    section, steps = config.checkpoint, config.train.steps
    num_kept = 1  # at the same time
    if section.every_steps is not None:
        num_kept += section.keep_last + (0 if section.keep_best is None else section.keep_best.count)
        num_kept = num_kept if steps is None else min(num_kept, -(-steps // section.every_steps))
    written = sum(file.stat().st_size for file in Path(config.run.folder).rglob("*") if file.is_file())
    return num_kept * (trained_bytes + state_bytes + averages) + trained_bytes - written


def _is_cached(kind: str, name: str) -> bool:
    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    return folder.is_dir() and any(folder.iterdir())
