"""A run small enough for one process and a few milliseconds."""

import json
from dataclasses import asdict

import torch
from torch import nn

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.format.manifest import MANIFEST_DIGEST_KEY, RunFingerprint, file_checksum, manifest_digest
from finetune.checkpoint.sharding.access import NamedState
from finetune.checkpoint.sharding.state_access import LossScale
from finetune.checkpoint.sharding.state_layout import StateLayout, named_buffers, named_parameters, replicated_view
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.runtime.progress import Progress


def forge(checkpoint, name, change):
    """Change a file of the checkpoint as somebody does who knows of the digests, and puts them right again."""
    path, manifest = checkpoint / name, checkpoint / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    value = json.loads(manifest.read_text())
    if name != "manifest.json":
        value["files"][name] = asdict(file_checksum(path))
    if isinstance(value, dict):
        manifest.write_text(json.dumps(value | {MANIFEST_DIGEST_KEY: manifest_digest(value)}))


class Run:
    """A small model that trains on one process, and the checkpoints of its folder."""

    def __init__(self, folder, *, width=4, identity=None, **section):
        torch.manual_seed(0)
        self.folder = folder
        self.said = []
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        held = {name: replicated_view(parameter) for name, parameter in named_parameters(self.model).items()}
        self.access = NamedState(
            StateLayout(shards=held, buffers=named_buffers(self.model)),
            self.optimizer,
            device=torch.device("cpu"),
            loss_scale=LossScale(scaler=None, deepspeed=None),
        )
        self.checkpointer = Checkpointer(
            folder,
            section=CheckpointSection(**section),
            access=self.access,
            run=RunFingerprint(identity or {"model": "small", "data": "abc"}, settings={}, origin={}),
            log=self.said.append,
        )

    def train(self, steps, *, save=True):
        for step in steps:
            rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save:
                self.checkpointer.save(step + 1, progress=Progress(step=step + 1, num_tokens=10 * step).state_dict())
        return self

    def resume(self):
        return self.checkpointer.load(self.checkpointer.find())

    def everything(self):
        states = {
            f"{index}/{key}": value
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        return {**self.model.state_dict(), **states}
