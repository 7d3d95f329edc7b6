"""Network, memory, cores, disks, software and variables of a machine."""

from dataclasses import replace

import pytest

from finetune.commands.doctor.checks import Facts, bus_bandwidth, compute_seconds, strategy_costs
from finetune.commands.doctor.findings import Severity
from finetune.commands.doctor.job_facts import HubName, JobFacts
from finetune.commands.doctor.network import HubFacts, InfinibandPort, chosen_interfaces
from finetune.commands.doctor.ranks import AllReduceSpeed, LinkFacts, pairs_to_measure
from finetune.commands.doctor.software import Lock
from finetune.runtime.upstream import ABANDONED, BUILDING
from tests.commands.doctor.recorded import findings_of, host_of, ranks_of

H100, CPU = "h100_nvswitch", "cpu_node"
MUST, SHOULD, NOTE = Severity.MUST_FIX, Severity.SHOULD_FIX, Severity.NOTE


@pytest.mark.parametrize(
    ("value", "names"),
    [("bond", ["bond0"]), ("=bond", []), ("=bond0,lo", ["lo", "bond0"]), ("^docker,lo", ["bond0"]), ("eth", [])],
)
def test_interfaces_are_chosen_as_nccl_chooses_them(value, names):
    assert [each.name for each in chosen_interfaces(value, host_of(H100).network.interfaces)] == names


def test_a_virtual_interface_must_be_fixed_between_machines_and_should_be_on_one():
    host = host_of(H100, variables={"NCCL_SOCKET_IFNAME": "docker0"})
    assert findings_of(host)["socket-interface"].severity is SHOULD
    finding = findings_of(host, replace(host_of(H100), hostname="dgx-02"))["socket-interface"]
    assert (finding.severity, finding.fix, finding.hosts) == (MUST, "export NCCL_SOCKET_IFNAME=bond0", ("dgx-01",))


def test_an_interface_that_does_not_exist_must_be_fixed():
    finding = findings_of(host_of(H100, variables={"GLOO_SOCKET_IFNAME": "eth0"}))["socket-interface"]
    assert finding.severity is MUST and "docker0" in finding.what


def test_machines_whose_own_name_is_a_loopback_address_must_be_fixed():
    hosts = [host_of(H100, hostname=name, network={"host_address": "127.0.1.1"}) for name in ("a", "b")]
    finding = findings_of(*hosts)["gloo-loopback"]
    assert finding.severity is MUST and "GLOO_SOCKET_IFNAME=bond0" in finding.fix and finding.hosts == ()


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"variables": {"NCCL_IB_DISABLE": "1"}}, "infiniband-off", "unset NCCL_IB_DISABLE"),
        ({"system": {"locked_memory_bytes": 65536}}, "locked-memory", "ulimit -l unlimited"),
        (
            {"network": {"infiniband": (InfinibandPort("mlx5_0", 1, "ACTIVE"), InfinibandPort("mlx5_1", 1, "DOWN"))}},
            "infiniband-down",
            "ibstat",
        ),
    ],
)
def test_a_problem_of_infiniband_is_reported_with_its_fix(changes, key, fix):
    finding = findings_of(host_of(H100, **changes))[key]
    assert finding.severity is SHOULD and fix in finding.fix


def test_an_unreachable_hub_must_be_fixed_only_if_the_job_needs_it():
    host = host_of(H100, network={"hub": HubFacts("https://huggingface.co", problem="timed out")})
    names = (HubName("model.name", "Qwen/Qwen3-8B", True), HubName("data.train.name", "tatsu-lab/alpaca", False))
    assert findings_of(host, job=JobFacts("job.yaml", names=names[:1]))["hub"].severity is NOTE
    finding = findings_of(host, job=JobFacts("job.yaml", names=names))["hub"]
    assert finding.severity is MUST and "hf download tatsu-lab/alpaca --repo-type dataset" in finding.fix
    assert "Qwen" not in finding.why


@pytest.mark.parametrize(
    ("changes", "key", "severity", "fix"),
    [
        ({"system": {"usable_cores": 8}}, "cores-per-rank", SHOULD, "--cpus-per-task"),
        ({"variables": {"OMP_NUM_THREADS": "96"}}, "too-many-threads", SHOULD, "export OMP_NUM_THREADS=28"),
        ({"system": {"files_hard": 500}}, "open-files", MUST, "nofile=515"),
        ({"system": {"files_hard": 2048}}, "open-files", NOTE, "nofile=3512"),
        ({"system": {"governor": "powersave"}}, "governor", NOTE, "cpupower"),
        ({"system": {"has_battery": True, "is_plugged_in": True}}, "laptop", NOTE, "systemd-inhibit"),
        ({"system": {"is_wsl": True}}, "wsl-p2p", SHOULD, "NCCL_P2P_DISABLE=1"),
        ({"storage": {"shared_bytes": 64 << 20}}, "shared-memory", SHOULD, "--shm-size=8g"),
        ({"storage": {"shared_free_bytes": 1 << 20}}, "shared-memory", NOTE, "/dev/shm"),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, "variable", SHOULD, "unset CUDA_LAUNCH_BLOCKING"),
        ({"variables": {"NCCL_DEBUG": "INFO"}}, "variable", NOTE, "unset NCCL_DEBUG"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": ""}}, "visible-devices", MUST, "unset CUDA_VISIBLE_DEVICES"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": "0,8"}}, "visible-devices", MUST, "CUDA_VISIBLE_DEVICES=0,1,2"),
        ({"variables": {"CUDA_VISIBLE_DEVICES": "0,1"}}, "visible-devices", NOTE, "unset"),
        ({"variables": {"ACCELERATE_USE_FSDP": "true"}}, "launcher-variables", SHOULD, "unset ACCELERATE_USE_FSDP"),
        ({"variables": {"LD_LIBRARY_PATH": "/usr/local/cuda-11.8/lib64"}}, "library-path", NOTE, "LD_LIBRARY_PATH"),
    ],
)
def test_each_fault_of_a_server_is_reported_with_its_fix(changes, key, severity, fix):
    finding = findings_of(host_of(H100, **changes))[key]
    assert finding.severity is severity and fix in finding.fix


def test_uuids_and_launched_processes_may_hide_devices():
    assert "visible-devices" not in findings_of(host_of(H100, variables={"CUDA_VISIBLE_DEVICES": "GPU-3f2c1a"}))
    launched = {"CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"}
    assert not {"visible-devices", "launcher-variables"} & findings_of(host_of(H100, variables=launched)).keys()


def test_a_job_that_writes_more_than_is_free_must_be_fixed():
    job = JobFacts("job.yaml", checkpoint_bytes=96_000_000_000, num_checkpoints=3, final_bytes=16_000_000_000)
    job = replace(job, written_bytes=10_000_000_000)  # by an earlier start
    disks = tuple(replace(disk, free_bytes=200_000_000_000) for disk in host_of(H100).storage.disks)
    finding = findings_of(host_of(H100, storage={"disks": disks}), job=job)["disk-room"]
    assert finding.severity is MUST and "checkpoint.keep_last" in finding.fix
    assert "294.0 GB" in finding.what and "200.0 GB are free" in finding.what


def test_a_disk_without_inodes_or_write_permission_must_be_fixed():
    (disk, _) = host_of(H100).storage.disks
    bad = replace(disk, free_files=12, is_writable=False)
    findings = findings_of(host_of(H100, storage={"disks": (bad,)}))
    assert findings["disk-files"].severity is findings["disk-not-writable"].severity is MUST


def test_ranks_that_load_more_than_the_container_limit_are_reported():
    job = JobFacts("job.yaml", num_parameters=8 * 10**9)
    finding = findings_of(host_of(CPU), job=job, ranks=ranks_of("pod-5c9f", "pod-5c9f"))["memory-loading"]
    assert "64.0 GB" in finding.what and "fsdp_cpu_ram_efficient_loading" in finding.fix


def test_a_build_lock_in_use_is_a_note_and_an_abandoned_one_must_be_removed():
    locks = {state: (Lock("/x/lock", state, f"/x/lock is {state}."),) for state in (BUILDING, ABANDONED)}
    assert findings_of(host_of(CPU, software={"locks": locks[BUILDING]}))["build-lock"].severity is NOTE
    assert findings_of(host_of(CPU, software={"locks": locks[ABANDONED]}))["build-lock"].fix == "rm /x/lock"


def test_a_default_accelerate_config_is_more_severe_when_it_contradicts_the_machine():
    written = {"use_cpu": "True", "num_processes": "1", "mixed_precision": "fp16"}
    changes = {"accelerate_config": "/home/default_config.yaml", "accelerate_settings": written}
    finding = findings_of(host_of(H100, software=changes))["accelerate-config"]
    assert finding.severity is SHOULD and "use_cpu" in finding.what and "train.precision" in finding.what
    plain = findings_of(host_of(H100, software={**changes, "accelerate_settings": {}}))["accelerate-config"]
    assert plain.severity is NOTE and "--config_file" in plain.fix


LINK = LinkFacts("gloo", (AllReduceSpeed(4096, 1e-4), AllReduceSpeed(10**9, 1.5)))


def facts(job=None):
    return Facts((), ranks_of("a", "a", "b", "b", flops_per_second=1e12), LINK, job)


def test_bus_bandwidth_of_four_ranks_is_one_and_a_half_times_the_algorithm_bandwidth():
    assert bus_bandwidth(LINK, world=4) == pytest.approx(1e9)


def test_bytes_sent_per_step_with_full_fine_tuning():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**9, item_bytes=2, global_batch_size=16, microbatch_size=2)
    costs = {cost.name: cost.num_bytes for cost in strategy_costs(facts(job))}
    assert costs == {
        "ddp": 1.5 * 4e9,  # gradients in float32, twice three quarters
        "zero1, zero2": 1.5 * 4e9 + 0.75 * 2e9,  # and the updated weights
        "fsdp2, zero3": 0.75 * (2 * 2 * 2e9 + 4e9),  # weights twice in each of 2 microbatches, gradients once
    }


def test_an_adapter_reduces_the_communication_of_ddp_and_not_of_fsdp():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**7, item_bytes=2, global_batch_size=8, microbatch_size=2)
    ddp, _, fsdp = strategy_costs(facts(job))
    assert ddp.seconds == pytest.approx(0.06) and fsdp.seconds > 50 * ddp.seconds


def test_compute_time_counts_six_operations_per_parameter_and_token():
    job = JobFacts("j", num_parameters=10**9, num_trained=10**9, tokens_per_step=4000)
    assert compute_seconds(facts(job)) == pytest.approx(6e9 * 1000 / 0.5e12)
    assert compute_seconds(facts()) is None


def test_all_pairs_of_a_small_world_and_neighbors_in_a_large_one_are_measured():
    assert len(pairs_to_measure(8)) == 28
    assert pairs_to_measure(64)[-1] == (62, 63) and len(pairs_to_measure(64)) == 63
