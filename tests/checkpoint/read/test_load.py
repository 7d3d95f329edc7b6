"""A checkpoint is opened on its own, and only what its manifest vouches for is ever read."""

import json
from dataclasses import replace

import torch

from finetune.checkpoint.format.manifest import file_checksum, read_manifest, write_manifest
from finetune.checkpoint.format.tensor_file import PARAMETER
from finetune.checkpoint.read.load import open_checkpoint
from finetune.errors import CheckpointError
from tests.checkpoint.small_run import Run
from tests.refusals import refused


def rewritten(checkpoint, name, change):
    """Change a JSON file of the checkpoint, and its manifest with it."""
    value = json.loads((checkpoint / name).read_text())
    change(value)
    (checkpoint / name).write_text(json.dumps(value))
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, replace(manifest, files={**manifest.files, name: file_checksum(checkpoint / name)}))


def test_a_loaded_checkpoint_holds_every_tensor_as_trained(folder):
    run = Run(folder).train(range(2))
    opened = open_checkpoint(folder / "step-000002")
    state = run.model.state_dict()
    assert {record.name for record in opened.model_records()} == state.keys()
    for name, value in state.items():
        assert torch.equal(opened.read(name), value), name
    assert torch.equal(opened.read("0.weight/exp_avg"), run.optimizer.state[run.model[0].weight]["exp_avg"])
    assert sum(record.key == PARAMETER for record in opened.records.values()) == 6
    assert opened.progress["step"] == 2
    assert opened.scalars["optimizer"]["0.weight"] == {"step": 2.0}


def test_a_damaged_checkpoint_is_not_opened(folder):
    Run(folder).train(range(1))
    path = folder / "step-000001" / "model" / "00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with refused(CheckpointError, "model/00000.safetensors"):
        open_checkpoint(folder / "step-000001")


def test_a_file_that_the_manifest_does_not_name_is_never_opened(folder):
    Run(folder).train(range(1))
    rewritten(folder / "step-000001", "index.json", lambda index: index["0.weight"].update(file="../../other"))
    with refused(CheckpointError, "'../../other'"):
        open_checkpoint(folder / "step-000001")
