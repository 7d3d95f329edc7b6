"""A checkpoint is opened on its own, and only what its manifest vouches for is ever read."""

import torch

from finetune.checkpoint.format.tensor_file import PARAMETER
from finetune.checkpoint.read.load import open_checkpoint
from tests.checkpoint.small_run import Run


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
