"""Weights are loaded directly to the device that uses them, without a copy of the model in host memory."""

import gc
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.model import ModelSection
from finetune.model.loading.load import load_model
from finetune.runtime.parameters import InitContext
from tests.devices import EVERY_DEVICE

SIZES = {
    "small": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320},
    "cpu": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 320},  # 90 million
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 12, "vocab_size": 32000},
}


@pytest.fixture(autouse=True)
def freed():
    """Free the GPU memory that a test has allocated."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def saved(folder: Path, size: str) -> Path:
    """Return the folder of a model in bfloat16, as they are published."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], num_attention_heads=8, num_key_value_heads=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def loaded(folder: Path, device: str | None, **section):
    section = ModelSection(name=str(folder), **section)
    context = InitContext(device=None if device is None else torch.device(device))
    return load_model(section, head="causal_lm", init_context=context, seed=1, vocabulary_size=None)


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process, without file pages, which processes share."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@EVERY_DEVICE
def test_weights_and_buffers_are_bitwise_those_that_the_cpu_loads(tmp_path, device, dtype):
    folder = saved(tmp_path, "small")
    direct, plain = loaded(folder, device, dtype=dtype), loaded(folder, None, dtype=dtype)
    assert {parameter.device.type for parameter in direct.parameters()} == {device}
    for kind in ("named_parameters", "named_buffers"):
        for (name, tensor), (_, expected) in zip(getattr(direct, kind)(), getattr(plain, kind)(), strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor.cpu(), expected), name


@EVERY_DEVICE
def test_loading_to_a_device_leaves_nothing_in_host_memory(tmp_path, device, figure):
    folder = saved(tmp_path, device)
    gc.collect()
    size = 2 * sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # bfloat16 becomes float32
    place = "meta" if device == "cpu" else device  # a device whose tensors take no memory of the host
    torch.zeros(1, device=place)  # makes CUDA's context, which takes host memory of its own
    before = anonymous_bytes()
    model = loaded(folder, place)
    assert {parameter.device.type for parameter in model.parameters()} == {place}
    taken = (anonymous_bytes() - before) / size
    figure("loading straight to a device: host memory, share of the model", taken, at_most=0.3)
