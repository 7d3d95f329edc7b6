"""Ranks from the variables of `mpirun`."""

import pytest

from finetune.errors import UserError
from finetune.launch.ranks.adopt import find_ranks
from tests.launch.ranks.test_slurm import STEP

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-77@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_open_mpi_on_one_host():
    ranks = find_ranks(OPEN_MPI)
    assert (ranks.rank, ranks.local_rank, ranks.world, ranks.local_world) == (1, 1, 2, 2)
    assert (ranks.address, ranks.source) == ("127.0.0.1", "mpirun (Open MPI)")
    assert find_ranks(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-host-78@1"}).port != ranks.port


def test_hydra_on_two_hosts_takes_the_address_that_it_is_given():
    ranks = find_ranks(HYDRA | {"MASTER_ADDR": "node1", "MASTER_PORT": "29501"})
    assert (ranks.rank, ranks.local_rank, ranks.world, ranks.local_world) == (3, 1, 4, 2)
    assert (ranks.address, ranks.port) == ("node1", 29501)


@pytest.mark.parametrize(
    "variables", [HYDRA, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}]
)
def test_several_hosts_need_an_address(variables):
    with pytest.raises(UserError, match="on several hosts: MASTER_ADDR is not set"):
        find_ranks(variables)


def test_mpirun_within_a_step_of_slurm_counts_before_the_step():
    assert find_ranks(STEP | OPEN_MPI).source == "mpirun (Open MPI)"


def test_pmi_of_srun_is_not_taken_for_mpirun():
    assert find_ranks(STEP | {"PMI_RANK": "5", "PMI_SIZE": "8"}).source == "srun (step 200505.3)"


@pytest.mark.parametrize("changed", [{"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, {"RANK": "0"}])
def test_one_process_is_alone(changed):
    assert find_ranks(OPEN_MPI | changed) is None


def test_numbers_that_are_missing_are_named():
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_LOCAL_SIZE is missing"):
        find_ranks({name: value for name, value in OPEN_MPI.items() if not name.endswith("LOCAL_SIZE")})
