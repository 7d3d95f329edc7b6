"""Facts that are gathered from NVML, the kernel's files, the network and a job."""

import socket
from types import SimpleNamespace

import pytest

from finetune.commands.doctor import gpus, job_facts
from finetune.commands.doctor.network import (
    InfinibandPort,
    gather_hub,
    read_default_interface,
    read_infiniband,
)
from finetune.commands.doctor.software import gather_variables, read_accelerate_settings
from finetune.commands.doctor.system import count_numa_nodes, gather_storage, read_iommu, read_memory_limit
from finetune.config.load import load_config


class NvmlError(Exception):
    """Stands for pynvml.NVMLError."""


ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlSystemGetDriverVersion": b"550.120",
    "nvmlSystemGetCudaDriverVersion_v2": 12040,
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=25_757_220_864, used=500_000_000),
    "nvmlDeviceGetCudaComputeCapability": [8, 9],
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:01:00.0"),
    "nvmlDeviceGetPersistenceMode": 0,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetPowerUsage": 21_500,
    "nvmlDeviceGetEnforcedPowerLimit": 300_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 450_000,
    "nvmlDeviceGetClockInfo": 210,
    "nvmlDeviceGetMaxClockInfo": 3105,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40,
    "nvmlDeviceGetTemperature": 43,
    "nvmlDeviceGetTemperatureThreshold": 90,
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1 << 30, usedGpuMemory=None)],
    "nvmlDeviceGetP2PStatus": 1,
}


class FakeNvml:
    """A driver with two RTX 4090 that raises for everything such cards do not support."""

    NVMLError = NvmlError

    def __getattr__(self, name):
        if name.startswith("NVML_"):
            return 0
        return lambda *_: ANSWERS[name] if name in ANSWERS else self._refuse()

    def _refuse(self):
        raise NvmlError("Not Supported")


def test_gpus_are_described_by_nvml(monkeypatch):
    monkeypatch.setattr(gpus, "pynvml", FakeNvml())
    facts = gpus.gather_gpus()
    gpu = facts.gpus[1]
    assert (facts.driver, facts.driver_cuda, facts.p2p) == ("550.120", "12.4", {"0-1": "chipset not supported"})
    assert (gpu.index, gpu.name, gpu.capability, gpu.ecc, gpu.mig) == (
        1,
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        None,
        False,
    )
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.power_default_watts) == (21.5, 300.0, 450.0)
    assert gpu.throttle_reasons == ("power cap", "hardware thermal slowdown")
    assert (gpu.pcie_width, gpu.max_pcie_width, gpu.compute_mode) == (8, 16, "exclusive process")
    assert gpu.processes[0].name == "unknown"


def test_a_machine_without_a_driver_has_no_gpus_and_one_whose_driver_fails_has_a_problem(monkeypatch, tmp_path):
    nvml = FakeNvml()
    nvml.nvmlInit = nvml._refuse
    monkeypatch.setattr(gpus, "pynvml", nvml)
    monkeypatch.setattr(gpus, "DRIVER_MARKS", (tmp_path / "driver",))
    assert gpus.gather_gpus().problem is None
    (tmp_path / "driver").touch()
    assert gpus.gather_gpus().problem == "Not Supported"


def test_nvml_of_this_machine_is_read_without_an_error():
    """On a machine with a GPU it answers; both are facts."""
    facts = gpus.gather_gpus()
    assert bool(facts.gpus) is (facts.driver is not None)


def files(folder, **texts):
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_numa_nodes_memory_limit_and_iommu_are_read_from_the_kernel(tmp_path):
    files(tmp_path, node0__cpulist="0-7\n", node1__cpulist="8-15\n", node2__cpulist="\n")
    assert count_numa_nodes(tmp_path) == 2
    files(tmp_path, **{"memory.max": "4000000000\n"})
    assert read_memory_limit(tmp_path, total=8 * 10**9) == 4 * 10**9
    assert read_memory_limit(tmp_path, total=10**9) is None
    files(tmp_path, **{"memory.max": "max\n"})
    assert read_memory_limit(tmp_path, total=8 * 10**9) is None
    assert read_iommu(tmp_path / "groups") == "off"
    assert read_iommu(files(tmp_path / "groups", **{"3__type": "identity\n"})) == "passthrough"
    assert read_iommu(files(tmp_path / "groups", **{"4__type": "DMA-FQ\n"})) == "translated"


def test_default_route_and_infiniband_are_read_from_the_kernel(tmp_path):
    table = "Iface\tDestination\tGateway\ndocker0\t000011AC\t00000000\neth1\t00000000\t0100A8C0\n"
    assert read_default_interface(files(tmp_path, route=table) / "route") == "eth1"
    assert read_default_interface(tmp_path / "none") is None
    port = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n", "link_layer": "InfiniBand\n"}
    files(tmp_path, **{f"ib__mlx5_0__ports__1__{name}": text for name, text in port.items()})
    assert read_infiniband(tmp_path / "ib") == (InfinibandPort("mlx5_0", 1, "ACTIVE", "200 Gb/sec (4X HDR)"),)


def test_the_hub_is_checked_by_opening_a_connection():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert gather_hub({"HF_ENDPOINT": place}).seconds is not None
        through = gather_hub({"HTTPS_PROXY": place.replace("//", "//user:secret@")})
        assert through.seconds is not None and "secret" not in str(through)
    assert "refused" in (gather_hub({"HF_ENDPOINT": place}).problem or "")
    assert gather_hub({"HF_HUB_OFFLINE": "1"}).is_offline_wanted


def test_variables_are_recorded_without_secrets():
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz", "EDITOR": "vi", "OMP_NUM_THREADS": "4"}
    found = gather_variables({**given, "HTTPS_PROXY": "http://me:secret@proxy:3128"})
    assert found["NCCL_DEBUG"] == "INFO" and found["OMP_NUM_THREADS"] == "4"
    assert "EDITOR" not in found and "abcdef" not in str(found) and "secret" not in str(found)


def test_the_disk_speed_probe_leaves_no_file(tmp_path):
    (disk,) = gather_storage({"run": tmp_path / "not" / "yet"}).disks
    assert disk.is_writable and disk.free_bytes > 0 and (disk.write_bytes_per_second or 0) > 0
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_accelerate_config_has_no_settings(tmp_path):
    files(tmp_path, good="num_processes: 2\nuse_cpu: true\nextra: 1\n", bad="a: [1\n")
    assert read_accelerate_settings(tmp_path / "good") == {"num_processes": "2", "use_cpu": "True"}
    assert read_accelerate_settings(tmp_path / "bad") == {}


JOB = """
run: {{folder: {folder}/run}}
model:
  from_config: {{model_type: llama, values: {values}}}
  tokenizer: {{train: {{vocabulary_size: 300}}}}
{more}
data: {{train: {{path: "{folder}/*.jsonl"}}, max_length: 64, chat_template: chatml, cache_folder: {folder}/cache}}
task: {{name: sft}}
train: {{global_batch_size: 8, microbatch_size: 2, steps: 100, learning_rate: 1e-3}}
checkpoint: {{every_steps: 10, keep_last: 3}}
"""
VALUES = "{hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 1, vocab_size: 300}"


def write_job(folder, *, values=VALUES, more=""):
    (folder / "rows.jsonl").write_text('{"prompt": "say 1", "completion": "1"}\n')
    (folder / "job.yaml").write_text(JOB.format(folder=folder, values=values, more=more))
    return load_config(folder / "job.yaml", [])


def test_the_bytes_that_a_job_writes_are_computed_from_its_model(tmp_path):
    facts = job_facts.gather_job(write_job(tmp_path))
    assert facts.problem is None and facts.num_parameters == facts.num_trained > 5_000
    assert facts.checkpoint_bytes == 3 * 4 * facts.num_parameters and facts.final_bytes == 4 * facts.num_parameters
    assert (facts.num_checkpoints, facts.tokens_per_step, facts.cache_bytes) == (4, 512, 39)


def test_an_adapter_trains_and_saves_only_its_own_parameters(tmp_path):
    facts = job_facts.gather_job(write_job(tmp_path, more="  lora: {rank: 4}"))
    attention, mlp = 4 * 4 * (8 + 8), 3 * 4 * (8 + 16)
    assert facts.num_trained == attention + mlp
    assert facts.final_bytes == 4 * facts.num_trained


@pytest.mark.parametrize("more", ["  lora: {rank: 4, target_modules: [q_proj, v_proj]}"])
def test_an_adapter_on_some_modules_counts_only_those(tmp_path, more):
    assert job_facts.gather_job(write_job(tmp_path, more=more)).num_trained == 2 * 4 * (8 + 8)
