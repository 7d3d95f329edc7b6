"""A save in the background stops training for the copy alone, and writes what a save in the foreground writes."""

import gc
import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.load import verify_checkpoint
from finetune.checkpoint.sharding.access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import StateLayout, named_parameters, replicated_view
from finetune.checkpoint.write.saver import Saver
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.runtime.progress import Progress
from tests.devices import EVERY_DEVICE

SHAPES = {"cpu": ((30, 40), (70,)), "cuda": ((4096, 8192),) * 37 + ((4096, 2048), (4096,))}
"""On a GPU 1.25 billion weights in float32: 15 GB with AdamW's moments, in files of odd sizes."""


@pytest.fixture
def state():
    """Return a function that makes a state on a device, with moments that are not zero, and access to it."""

    def make(device, shapes):
        model = nn.ParameterList(nn.Parameter(torch.full(shape, 0.5, device=device)) for shape in shapes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for each in model:
            each.grad = torch.linspace(-1, 1, each.numel(), device=device).view_as(each)
        optimizer.step()
        optimizer.zero_grad()
        views = {name: replicated_view(parameter) for name, parameter in named_parameters(model).items()}
        scale = LossScale(scaler=None, deepspeed=None)
        device = torch.device(device)
        return StateAccess(StateLayout(shards=views, buffers={}), optimizer, device=device, loss_scale=scale), model

    yield make
    gc.collect()
    torch.cuda.empty_cache()


def make_saver(folder, access, *, is_background, saved):
    """Return a saver that appends each checkpoint to the list `saved`, and fails where it would have to warn."""
    return Saver(
        folder,
        section=CheckpointSection(asynchronous=is_background, rehearse=False),
        access=access,
        run=RunFingerprint({"model": "small"}, settings={}, origin={}),
        on_saved=saved.append,
        warn=lambda step, message: pytest.fail(message),
    )


@EVERY_DEVICE
def test_a_background_save_equals_a_foreground_save(device, state, tmp_path):
    access, _ = state(device, SHAPES["cpu"])
    digests, checkpoints = [], []
    for is_background in (True, False):
        saver = make_saver(tmp_path / str(is_background), access, is_background=is_background, saved=checkpoints)
        saver(Progress(step=1))
        saver.wait_for_writes()
        checkpoint = checkpoints[-1]
        digests.append(verify_checkpoint(checkpoint.path).manifest.state_sha256)
        assert (checkpoint.stall_seconds < checkpoint.seconds) == is_background
    assert len(checkpoints) == 2
    assert digests[0] == digests[1]


@EVERY_DEVICE
def test_training_waits_for_15_gb_no_longer_than_the_copy_takes(device, state, tmp_path, figure):
    """The weights change as soon as training goes on; what is written is what they were."""
    access, model = state(device, SHAPES[device])
    size = sum(record.size_bytes for record in access.records())
    if device == "cuda":
        assert 14.5e9 < size < 15.5e9
        if shutil.disk_usage(tmp_path).free < 18e9:
            pytest.skip("needs 18 GB of disk")
    expected = digests_of(access)
    checkpoints = []
    saver = make_saver(tmp_path, access, is_background=True, saved=checkpoints)
    saver._contents.capture(1, progress={})  # as the rehearsal of a run does: its buffers exist at the first save
    saver(Progress(step=1))
    with torch.no_grad():
        for each in model:
            each.zero_()
    saver.wait_for_writes()
    (saved,) = checkpoints
    limit = 1.5 if device == "cuda" else None
    figure(f"asynchronous save of {size / 1e9:.1f} GB: stall, seconds", saved.stall_seconds, at_most=limit)
    figure(f"asynchronous save of {size / 1e9:.1f} GB: all of it, seconds", saved.seconds)
    index = saved_index(saved.path)
    assert len(index) == 3 * len(SHAPES[device])
    assert index == expected
    del saver, access, model
    shutil.rmtree(saved.path)


def digests_of(access):
    """Return the SHA-256 of every tensor's bytes, which is what a save in the foreground writes."""

    def digest(record):
        return record.stored_name, hashlib.sha256(access.read(record).cpu().numpy().data).hexdigest()

    with ThreadPoolExecutor(8) as threads:
        return dict(threads.map(digest, access.records()))


def saved_index(path):
    found = json.loads((path / "index.json").read_text())
    return {name: entry["sha256"] for name, entry in found.items()}
