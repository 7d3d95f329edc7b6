"""A damaged file's damaged tensors are named one by one."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from finetune.checkpoint.read.inventory import damaged_tensors


@pytest.fixture
def weights(tmp_path):
    """A file of two tensors, `first` before `second`, and what an index says of it."""
    tensors = {"first": torch.arange(4.0), "second": torch.arange(6.0)}
    path = tmp_path / "00000.safetensors"
    save_file(tensors, path)
    entries = {name: {"sha256": hashlib.sha256(each.numpy().tobytes()).hexdigest()} for name, each in tensors.items()}
    return path, entries


def test_an_undamaged_file_has_none(weights):
    assert damaged_tensors(*weights) == []


@pytest.mark.parametrize(("from_the_end", "name"), [(1, "second"), (6 * 4, "second"), (6 * 4 + 1, "first")])
def test_a_flipped_byte_is_in_one_of_them(weights, from_the_end, name):
    path, entries = weights
    data = bytearray(path.read_bytes())
    data[-from_the_end] ^= 1
    path.write_bytes(bytes(data))
    assert damaged_tensors(path, entries) == [name]


def test_tensors_before_the_truncation_of_a_file_are_undamaged(weights):
    path, entries = weights
    path.write_bytes(path.read_bytes()[:-5])
    assert damaged_tensors(path, entries) == ["second"]


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"{}"])
def test_all_are_damaged_where_nothing_can_be_found(weights, content):
    path, entries = weights
    path.write_bytes(content)
    assert damaged_tensors(path, entries) == ["first", "second"]


def test_a_missing_file_has_nothing_left(weights):
    path, entries = weights
    path.unlink()
    assert damaged_tensors(path, entries) == ["first", "second"]


def test_every_tensor_without_a_digest_counts_as_damaged(weights):
    path, entries = weights
    assert damaged_tensors(path, {name: {} for name in entries}) == ["first", "second"]
