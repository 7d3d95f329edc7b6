"""The ranks of processes that `mpirun` has started: Open MPI, and Hydra of MPICH and Intel MPI."""

from collections.abc import Mapping

from finetune.errors import UserError
from finetune.launch.ranks.started import LOCALHOST, Ranks, make_ranks, read_count

_FLAVOURS = {
    "Open MPI": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    "Hydra": {
        "rank": "PMI_RANK",
        "world": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",  # not set by srun --mpi=pmi2, which sets the two above
        "local_world": "MPI_LOCALNRANKS",
    },
}

_JOB_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Variables that all processes of one start share and no other start has."""


def mpi_ranks(variables: Mapping[str, str]) -> Ranks | None:
    """Return the ranks of this process; None where no `mpirun` has started it, or it alone.

    Raises UserError on several hosts without MASTER_ADDR: MPI sets no variable with the host of rank 0.
    """
    for flavour, names in _FLAVOURS.items():
        if names["rank"] in variables and names["local_rank"] in variables:
            return _ranks(variables, names, source=f"mpirun ({flavour})")
    return None


def _ranks(variables: Mapping[str, str], names: Mapping[str, str], *, source: str) -> Ranks | None:
    world, local_world = (read_count(variables, names[name]) for name in ("world", "local_world"))
    if world == 1:
        return None
    if local_world < world and not variables.get("MASTER_ADDR"):
        raise UserError(
            f"{source} on several hosts: MASTER_ADDR is not set. Give all processes the name of the first host: "
            "mpirun -x MASTER_ADDR=HOST (Hydra: -genv MASTER_ADDR HOST)."
        )
    job = next((variables[name] for name in _JOB_NAMES if name in variables), "")
    return make_ranks(variables, names, local_world=local_world, address=LOCALHOST, job=job, source=source)
