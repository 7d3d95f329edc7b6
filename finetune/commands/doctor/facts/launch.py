"""What is known of a job, of the ranks of a launch, and of all machines together; to and from JSON."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from finetune.commands.doctor.facts.host import HostFacts
from finetune.errors import UserError
from finetune.runtime.files.read import first_problem, read_json


@dataclass(frozen=True)
class HubName:
    """A model, tokenizer or dataset of the job on the hub."""

    key: str
    name: str
    is_cached: bool


@dataclass(frozen=True)
class JobFacts:
    """What a job computes, reads and writes."""

    file: str
    num_parameters: int = 0
    num_trained: int = 0
    item_bytes: int = 4  # of a number in the forward pass
    gradient_bytes: int = 4  # of a number of the gradients
    global_batch_size: int = 1
    microbatch_size: int = 1
    tokens_per_step: int = 0  # at most
    checkpoint_bytes: int = 0
    num_checkpoints: int = 0  # at the same time
    final_bytes: int = 0
    written_bytes: int = 0  # of the run folder, if the job has been run before
    cache_bytes: int = 0
    names: tuple[HubName, ...] = ()
    problem: str | None = None  # why the model could not be built


@dataclass(frozen=True)
class RankFacts:
    """One process of a launch."""

    rank: int
    hostname: str
    local_rank: int = 0
    arrived_seconds: float = 0.0  # after the first
    clock_offset_seconds: float = 0.0  # of its machine, against rank 0's
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    nccl: str | None = None
    device: str = "cpu"
    flops_per_second: float = 0.0  # of a matrix product


@dataclass(frozen=True)
class AllReduceSpeed:
    """All-reduces of one size over all ranks."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PairSpeed:
    """Messages between two ranks."""

    first: int
    second: int
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class LinkFacts:
    """What was measured between the ranks."""

    backend: str
    all_reduce: tuple[AllReduceSpeed, ...]
    pairs: tuple[PairSpeed, ...] = ()


@dataclass(frozen=True)
class Facts:
    """All machines and ranks of a launch, or the one machine without a launch."""

    hosts: tuple[HostFacts, ...]
    ranks: tuple[RankFacts, ...] = ()
    link: LinkFacts | None = None
    job: JobFacts | None = None

    @property
    def world(self) -> int:
        """Return the number of ranks, 1 without a launch."""
        return max(1, len(self.ranks))


_FACTS: TypeAdapter[Facts] = TypeAdapter(Facts)


def facts_as_json(facts: Facts) -> dict[str, Any]:
    """Return the facts as plain values."""
    return dataclasses.asdict(facts)


def read_facts(path: Path) -> Facts:
    """Return the facts that `doctor --json` printed; raises UserError for a file that has none."""
    try:
        content = read_json(path)
        return _FACTS.validate_python(content.get("facts", content) if isinstance(content, dict) else content)
    except ValidationError as error:
        raise UserError(f"--facts {path}: {first_problem(error)}. Give a file that `doctor --json` wrote.") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"--facts {path}: it cannot be read ({error}). Give a file that `doctor --json` wrote."
        ) from error
