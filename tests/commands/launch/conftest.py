"""A job and accelerate files for job files, and what makes a job file of words."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.launch import job_files
from finetune.commands.launch.job_files import JobFileArguments

ROOT = Path(__file__).parents[3]
CONFIGS = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
"""Every accelerate file of the repository."""


@pytest.fixture
def project(job: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a job, with the accelerate files; these "hosts" share /tmp."""
    for folder in ("accelerate_configs", "ds_configs"):
        shutil.copytree(ROOT / folder, job.parent / folder)
    text = job.read_text().replace("name: gpt2", "from_config: {model_type: llama}\n  tokenizer: {name: gpt2}")
    job.write_text(text.replace("microbatch_size: 4", "microbatch_size: 1"))
    monkeypatch.setattr(job_files, "_LOCAL_FOLDERS", ())
    monkeypatch.chdir(job.parent)
    return job.parent


@pytest.fixture
def words(project: Path) -> Callable[..., JobFileArguments]:
    """Return a function that makes the words of a job on two hosts with two ranks each."""

    def make(strategy: str = "ddp", *, nodes: int = 2, gpus_per_node: int = 2, **others: object) -> JobFileArguments:
        accelerate = project / "accelerate_configs" / f"{strategy}.yaml"
        return JobFileArguments(project / "job.yaml", accelerate, nodes=nodes, gpus_per_node=gpus_per_node, **others)  # type: ignore[arg-type]

    return make


def fits(strategy: str, *, nodes: int, gpus_per_node: int) -> bool:
    """Tell whether the accelerate file is for this number of ranks.

    `single` is for one, HSDP for the product of its copies, tensor parallelism for groups of two, several under FSDP2.
    """
    world = nodes * gpus_per_node
    if strategy == "single":
        return world == 1
    if nodes > 1 and strategy.endswith("hsdp"):
        return True  # a copy per host
    sizes = {"hsdp": 4, "multi_node_hsdp": 16}
    if strategy == "fsdp2_tensor_parallel":
        return world % 2 == 0 and world > 2
    if strategy == "tensor_parallel" or "sequence_parallel" in strategy:
        return world % 2 == 0
    return world == sizes.get(strategy, world)
