"""Ranks from the variables of `srun`: a table of what Slurm sets, and of what is no step."""

import pytest

from finetune.errors import UserError
from finetune.launch.ranks import adopt_ranks, find_ranks, first_host, slurm_ranks, tasks_per_host

BATCH = {  # of a batch script with --nodes=2 --ntasks-per-node=4, as people print them
    "SLURM_JOB_ID": "200505",
    "SLURM_JOB_NODELIST": "gnode[10,20]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
}
STEP = BATCH | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gnode[10,20]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
ON_ONE_HOST = STEP | {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gnode20",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "0",
}


def test_a_task_of_a_step_has_the_variables_of_torchrun():
    variables = dict(STEP)
    ranks = adopt_ranks(variables)
    assert ranks is not None and str(ranks).startswith("8 processes by srun (step 200505.3); rank 0 is at gnode10:")
    assert [variables[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")] == [
        *("5", "1", "8", "4", "gnode10")
    ]
    assert 15000 <= int(variables["MASTER_PORT"]) < 32000  # below what Linux gives to clients
    assert (variables["OMP_NUM_THREADS"], variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("1", "1")


def test_all_tasks_of_a_step_agree_on_the_port_and_other_steps_have_others():
    ports = {rank: slurm_ranks(STEP | {"SLURM_PROCID": str(rank)}).port for rank in range(8)}
    assert len(set(ports.values())) == 1
    steps = [
        slurm_ranks(STEP | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(200505, 200515)
        for step in range(4)
    ]
    assert len(set(steps)) >= 38


def test_on_one_host_the_address_needs_no_name_service():
    assert slurm_ranks(ON_ONE_HOST).address == "127.0.0.1"


def test_variables_set_by_the_script_are_kept():
    variables = STEP | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "29999", "OMP_NUM_THREADS": "7"}
    adopt_ranks(variables)
    assert [variables[each] for each in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")] == ["10.1.1.1", "29999", "7"]


NO_STEPS = {
    "nothing": {},
    "a batch script with eight tasks": BATCH,
    "a batch script that has a number of its own": STEP | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
    "the shell of salloc": STEP | {"SLURM_STEP_ID": "4294967290"},
    "a step of one task": STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
    "a process of torchrun within a step": STEP | {"RANK": "0"},
    "the one process of accelerate launch": STEP | {"ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "NO"},
    "a step without its size": {key: value for key, value in STEP.items() if key != "SLURM_STEP_NUM_TASKS"},
}


@pytest.mark.parametrize("name", NO_STEPS)
def test_no_ranks_are_taken_where_srun_has_not_started_several(name):
    variables = dict(NO_STEPS[name])
    assert adopt_ranks(variables) is None
    assert variables == NO_STEPS[name]


HOSTS = {
    "a": "a",
    "a[001-003,7],b": "a001",
    "a[7,001-003],b": "a7",
    "login1,gpu[1-4]": "login1",
    "gpu-[09-12].cluster.example,x": "gpu-09.cluster.example",
    "rack[2-3]node[001-128]": "rack2node001",
    "r[10,11]-c[1-2]-n[0-3]": "r10-c1-n0",
    "bgl[000x133]": "bgl000",
    "bgp[123x456,000x111]": "bgp123",
    "[01-04]": "01",
    "n[1-2]-ib0,n3": "n1-ib0",
    "node_a-1.b": "node_a-1.b",
}


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_first_host_of_a_list(hosts):
    assert first_host(hosts) == HOSTS[hosts]


@pytest.mark.parametrize(
    "hosts", ["", "(null)", "a[", "a]", "a[]", "a[1-]", "a[-1]", "a[1,,2]", ",a", "a b", "a[1-2", "a[x]", "a[1]]", "ä"]
)
def test_an_invalid_slurm_host_list_is_rejected(hosts):
    with pytest.raises(UserError, match="not a list of hosts"):
        first_host(hosts)


@pytest.mark.parametrize(
    ("counts", "found"), [("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("8(x2)", [8, 8]), ("1,2,1(x2)", [1, 2, 1, 1])]
)
def test_the_tasks_of_each_host(counts, found):
    assert tasks_per_host(counts) == found


@pytest.mark.parametrize("counts", ["", "2(x", "(x2)", "2(3)", "a", "1,,2", "-1", "2(x9999999)"])
def test_an_invalid_slurm_task_list_is_rejected(counts):
    with pytest.raises(UserError, match="not a list of numbers"):
        tasks_per_host(counts)


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_PROCID": "8"},
        {"SLURM_PROCID": "-1"},
        {"SLURM_PROCID": "two"},
        {"SLURM_LOCALID": "4"},
        {"SLURM_NODEID": "2"},
        {"SLURM_STEP_NUM_TASKS": "many"},
        {"SLURM_STEP_TASKS_PER_NODE": "9"},
        {"SLURM_STEP_NODELIST": "(null)"},
        {"MASTER_PORT": "http"},
    ],
)
def test_variables_that_contradict_each_other_are_refused(changed):
    with pytest.raises(UserError):
        find_ranks(STEP | changed)


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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "abc"}, "RANK is 'abc'"),
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is missing"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1"}, "MASTER_ADDR is missing"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "h"}, "RANK=2 is not"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
        ({"RANK": "\u0663", "WORLD_SIZE": "9"}, "RANK is '\u0663'"),
    ],
)
def test_variables_of_ranks_that_no_launcher_sets_are_named_with_how_to_unset_them(variables, message):
    with pytest.raises(UserError) as error:
        find_ranks(variables)
    assert message in str(error.value)
    assert all(f"-u {name}" in str(error.value) for name in variables if not name.startswith("MASTER"))


def test_a_step_of_slurm_needs_no_rank_although_its_script_exports_the_size_of_the_world():
    assert find_ranks(STEP | {"WORLD_SIZE": "8", "MASTER_ADDR": "gnode10"}).rank == 5


def test_the_ranks_of_a_launcher_and_of_one_process_are_left_alone():
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    assert [find_ranks(variables) for variables in (launched, {"RANK": "0", "WORLD_SIZE": "1"}, {})] == [None] * 3
