"""The ranks of processes that `srun` or `mpirun` has started, as PyTorch's variables.

`accelerate launch` and `torchrun` set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for
each process; `srun` and `mpirun` set variables of their own, which say the same. Where RANK is set, by whomever, it
counts, and nothing here does anything.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from zlib import crc32

from finetune.errors import UserError

LOCALHOST = "127.0.0.1"

SINGLE_LAUNCH = ("ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_BACKEND")
"""What `accelerate launch` sets, without any rank, for the one process of `distributed_type: NO`."""

_FIRST_PORT, _NUM_PORTS = 15000, 17000  # below those that Linux hands out to clients


@dataclass(frozen=True)
class Ranks:
    """Where a process stands among all that were started with it."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str  # of the host of rank 0
    port: int
    source: str  # who has started them, for people

    def variables(self) -> dict[str, str]:
        """Return what torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }

    def __str__(self) -> str:
        return f"{self.world} processes by {self.source}; rank 0 is at {self.address}:{self.port}"


def is_launched(variables: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch`, torchrun or a script of the user's has said what the ranks are."""
    return "RANK" in variables or all(name in variables for name in SINGLE_LAUNCH)


def make_ranks(
    variables: Mapping[str, str],
    names: Mapping[str, str],
    *,
    local_world: int,
    address: str,
    job: str,
    source: str,
) -> Ranks:
    """Return the ranks that the variables of these `names` (rank, world, local_rank) give.

    MASTER_ADDR and MASTER_PORT count where they are set. Otherwise the port follows from `job`, a name that all
    processes of one start share. Raises UserError for numbers that contradict each other.
    """
    rank, world, local_rank = (read_count(variables, names[name]) for name in ("rank", "world", "local_rank"))
    if not (rank < world and local_rank < local_world <= world):
        raise UserError(
            f"{source}: {names['rank']}={rank}, {names['world']}={world}, {names['local_rank']}={local_rank} and "
            f"{local_world} processes on this host contradict each other. Start with torchrun or accelerate launch."
        )
    has_port = bool(variables.get("MASTER_PORT"))
    port = read_count(variables, "MASTER_PORT") if has_port else _FIRST_PORT + crc32(job.encode()) % _NUM_PORTS
    return Ranks(rank, world, local_rank, local_world, variables.get("MASTER_ADDR") or address, port, source)


def read_count(variables: Mapping[str, str], name: str) -> int:
    """Return the number in this variable, at least 0. Raises UserError."""
    value = variables.get(name, "")
    if not (value.isascii() and value.isdigit()):
        problem = f"is {value!r}, which is no number" if value else "is missing"
        raise UserError(f"the variable {name} {problem}, and ranks follow from it. Unset the others, or set RANK.")
    return int(value)


_AS_TORCHRUN = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
"""What torchrun sets, too, where the user has not: one thread for each process, and an end where a collective hangs."""


def set_ranks(variables: MutableMapping[str, str], ranks: Ranks) -> None:
    """Set what torchrun would have set."""
    variables.update(ranks.variables())
    for name, value in _AS_TORCHRUN.items():
        variables.setdefault(name, value)
