"""The ranks of this process, for every launcher."""

from collections.abc import Mapping, MutableMapping

from finetune.launch.ranks.mpi import mpi_ranks
from finetune.launch.ranks.slurm import slurm_ranks
from finetune.launch.ranks.started import Ranks, is_launched, set_ranks


def find_ranks(variables: Mapping[str, str]) -> Ranks | None:
    """Return what `srun` or `mpirun` says of this process; None where it is alone, or RANK is set. Raises UserError.

    MPI comes first: on several hosts of a Slurm job, `mpirun` itself is started by `srun`.
    """
    return None if is_launched(variables) else mpi_ranks(variables) or slurm_ranks(variables)


def adopt_ranks(variables: MutableMapping[str, str]) -> Ranks | None:
    """Set PyTorch's variables where `srun` or `mpirun` has started several processes, and return the ranks.

    Call it before torch is imported, which reads OMP_NUM_THREADS. Raises UserError.
    """
    ranks = find_ranks(variables)
    if ranks is not None:
        set_ranks(variables, ranks)
    return ranks
