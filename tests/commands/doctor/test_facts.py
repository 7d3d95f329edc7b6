"""Facts that are gathered from NVML, the kernel's files, the network and a job."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from finetune.commands.doctor import gpus
from finetune.commands.doctor.gpus import parse_links, read_links
from finetune.commands.doctor.job_facts import gather_job
from finetune.commands.doctor.network import InfinibandPort, gather_hub, read_default_interface, read_infiniband
from finetune.commands.doctor.system import gather_variables, translates_addresses
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
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4 | 0x40,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1 << 30, usedGpuMemory=None)],
    "nvmlDeviceGetP2PStatus": 1,
    "nvmlDeviceGetRemappedRows": (1, 0, 1, 0),
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
    assert (facts.driver, facts.driver_cuda, facts.without_p2p) == ("550.120", "12.4", ("0-1",))
    assert (gpu.index, gpu.name, gpu.memory_used_bytes) == (1, "NVIDIA GeForce RTX 4090", 500_000_000)
    assert (gpu.uncorrected_errors, gpu.is_remap_pending, gpu.has_failed_remap) == (0, True, False)
    assert gpu.throttle_reasons == ("hardware thermal slowdown",)
    assert gpu.processes == {1 << 30: "outside this container"}


def test_a_machine_without_a_driver_has_no_gpus_and_one_whose_driver_fails_has_a_problem(monkeypatch, tmp_path):
    nvml = FakeNvml()
    nvml.nvmlInit = nvml._refuse
    monkeypatch.setattr(gpus, "pynvml", nvml)
    monkeypatch.setattr(gpus, "DRIVER_MARKS", (tmp_path / "driver",))
    assert gpus.gather_gpus().problem is None
    (tmp_path / "driver").touch()
    assert gpus.gather_gpus().problem == "Not Supported"


def program(folder, text):
    """Put a program `nvidia-smi` into a folder."""
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.parametrize("text", [None, "echo the driver does not answer; exit 9"])
def test_an_nvidia_smi_that_is_missing_or_fails_is_an_error(tmp_path, monkeypatch, text):
    if text is not None:
        program(tmp_path, text)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match="nvidia-smi"):
        read_links()


def test_links_are_parsed_with_network_cards_without_affinities_and_with_terminal_codes():
    text = "\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tPXB\t48-63\nmlx5_0\tPXB\tSYS\t X \n"
    assert parse_links(text) == {"0-1": "NV12"}
    assert parse_links("\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n") == {"0-1": "SYS"}


def files(folder, **texts):
    for name, text in texts.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_iommu_default_route_and_infiniband_are_read_from_the_kernel(tmp_path):
    assert not translates_addresses(files(tmp_path / "groups", **{"3__type": "identity\n"}))
    assert translates_addresses(files(tmp_path / "groups", **{"4__type": "DMA-FQ\n"}))
    table = "Iface\tDestination\tGateway\ndocker0\t000011AC\t00000000\neth1\t00000000\t0100A8C0\n"
    assert read_default_interface(files(tmp_path, route=table) / "route") == "eth1"
    assert read_default_interface(tmp_path / "none") is None
    port = {"state": "4: ACTIVE\n", "rate": "200 Gb/sec (4X HDR)\n", "link_layer": "InfiniBand\n"}
    files(tmp_path, **{f"ib__mlx5_0__ports__1__{name}": text for name, text in port.items()})
    assert read_infiniband(tmp_path / "ib") == (InfinibandPort("mlx5_0", 1, "ACTIVE", "200 Gb/sec (4X HDR)"),)


def test_the_hub_is_asked_for_an_answer_of_any_kind():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # answers with error 501
        threading.Thread(target=server.handle_request, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        assert gather_hub({"HF_ENDPOINT": place}).seconds is not None
    assert "refused" in (gather_hub({"HF_ENDPOINT": place}).problem or "")
    assert gather_hub({"HF_HUB_OFFLINE": "1"}).is_offline_wanted


def test_variables_are_recorded_without_secrets():
    given = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz", "EDITOR": "vi", "OMP_NUM_THREADS": "4"}
    found = gather_variables({**given, "HTTPS_PROXY": "http://me:secret@proxy:3128"})
    assert found["NCCL_DEBUG"] == "INFO" and found["OMP_NUM_THREADS"] == "4"
    assert "EDITOR" not in found and "abcdef" not in str(found) and "secret" not in str(found)


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
    """4 checkpoints, of 3 kept and one in writing, with weights and two moments, and the final model; 3 that exist."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rest").write_text("old")
    full, lora = (gather_job(write_job(tmp_path, more=more)) for more in ("", "  lora: {rank: 4}"))
    parameters = 300 * 8 * 2 + 4 * 8 * 8 + 3 * 8 * 16 + 3 * 8
    assert full.problem is None and full.bytes_to_write == (4 * 3 + 1) * 4 * parameters - 3
    assert lora.bytes_to_write == (4 * 3 + 1) * 4 * (parameters // 200) - 3


def test_a_job_whose_model_is_not_cached_has_names_and_a_problem(tmp_path, monkeypatch):
    write_job(tmp_path)
    job = tmp_path / "job.yaml"
    lines = job.read_text().splitlines()
    lines[3:5] = ["  name: nobody/has-this-model"]
    job.write_text("\n".join(lines))
    facts = gather_job(load_config(job, []))
    assert [str(name) for name in facts.names if not name.is_cached] == ["model.name: nobody/has-this-model"]
    assert "nobody/has-this-model" in (facts.problem or "")
