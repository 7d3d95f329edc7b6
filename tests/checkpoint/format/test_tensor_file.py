import hashlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from finetune.checkpoint.format.tensor_file import PARAMETER, TensorFile, TensorRecord, dtype_code, read_range

TENSORS = {
    "matrix": torch.arange(12.0).view(4, 3),
    "scalar": torch.tensor(5.0),
    "half": torch.tensor([1.5, -0.0, float("nan")], dtype=torch.bfloat16),
    "codes": torch.tensor([[1], [255]], dtype=torch.uint8),
    "empty": torch.empty(0, 3),
}
RECORDS = [TensorRecord(name, PARAMETER, tuple(t.shape), dtype_code(t.dtype)) for name, t in TENSORS.items()]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "x.safetensors"
    file = TensorFile(path, RECORDS)
    for tensor in TENSORS.values():
        values = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert file.add(tensor) == hashlib.sha256(values.numpy().tobytes()).hexdigest()
    facts = file.close()
    assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts.size_bytes == path.stat().st_size
    return path


def test_the_safetensors_library_reads_written_tensor_files(path):
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_any_run_of_elements_can_be_read(path):
    with safe_open(path, framework="pt") as file:
        for record in RECORDS:
            flat = TENSORS[record.name].reshape(-1)
            for start in range(flat.numel() + 1):
                for stop in range(start, flat.numel() + 1):
                    part = read_range(file, record, start=start, stop=stop)
                    assert torch.equal(part.view(torch.uint8), flat[start:stop].view(torch.uint8))
