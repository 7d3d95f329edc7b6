"""Facts that are gathered from NVML, the kernel's files and the network."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from finetune.commands.doctor import gpus
from finetune.commands.doctor.facts import gather_names
from finetune.commands.doctor.gpus import parse_links, read_links
from finetune.commands.doctor.network import gather_hub, read_default_interface
from finetune.commands.doctor.system import gather_variables
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
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=1 << 30, usedGpuMemory=None)],
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
    assert (facts.driver, facts.driver_cuda) == ("550.120", "12.4")
    assert (gpu.index, gpu.name, gpu.memory_used_bytes) == (1, "NVIDIA GeForce RTX 4090", 500_000_000)
    assert (gpu.uncorrected_errors, gpu.is_remap_pending, gpu.has_failed_remap) == (0, True, False)
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


def test_the_interface_of_the_default_route_is_read_from_the_kernel(tmp_path):
    table = "Iface\tDestination\tGateway\ndocker0\t000011AC\t00000000\neth1\t00000000\t0100A8C0\n"
    (tmp_path / "route").write_text(table)
    assert read_default_interface(tmp_path / "route") == "eth1"
    assert read_default_interface(tmp_path / "none") is None


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
model: {{name: nobody/has-this-model}}
data: {{train: {{path: "{folder}/*.jsonl"}}, max_length: 64, chat_template: chatml, cache_folder: {folder}/cache}}
task: {{name: sft}}
train: {{global_batch_size: 8, microbatch_size: 2, steps: 100, learning_rate: 1e-3}}
"""


def write_job(folder):
    """Write a job whose model comes from the hub; return its path."""
    (folder / "rows.jsonl").write_text('{"prompt": "say 1", "completion": "1"}\n')
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    return folder / "job.yaml"


def test_the_models_of_a_job_that_are_not_cached_are_named(tmp_path):
    names = gather_names(load_config(write_job(tmp_path), []).config)
    assert [str(name) for name in names if not name.is_cached] == ["model.name: nobody/has-this-model"]
