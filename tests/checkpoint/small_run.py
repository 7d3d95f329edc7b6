"""A run small enough for one process and a few milliseconds."""

import json
from dataclasses import asdict

import torch
from torch import nn

from finetune.checkpoint.format.manifest import MANIFEST_DIGEST_KEY, RunFingerprint, file_checksum, manifest_digest
from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.checkpoint.read.load import find_checkpoint, resume_checkpoint
from finetune.checkpoint.sharding.access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import StateLayout, named_buffers, named_parameters, replicated_view
from finetune.checkpoint.write.saver import Saver
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
        self.saved = []
        self.events = []  # what the saver reported: checkpoints, and steps with warnings
        self.section = CheckpointSection(**section)
        self.fingerprint = RunFingerprint(identity or {"model": "small", "data": "abc"}, settings={}, origin={})
        self.checksums = ChecksumPrefetch()
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        held = {name: replicated_view(parameter) for name, parameter in named_parameters(self.model).items()}
        self.access = StateAccess(
            StateLayout(shards=held, buffers=named_buffers(self.model)),
            self.optimizer,
            device=torch.device("cpu"),
            loss_scale=LossScale(scaler=None, deepspeed=None),
        )
        self.saver = Saver(
            folder,
            section=self.section,
            access=self.access,
            run=self.fingerprint,
            on_saved=self.on_saved,
            warn=self.warn,
        )

    def on_saved(self, checkpoint):
        self.saved.append(checkpoint)
        self.events.append(checkpoint)

    def warn(self, step, message):
        self.said.append(message)
        self.events.append((step, message))

    def train(self, steps, *, save=True):
        for step in steps:
            rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            self.model(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if save:
                self.save(Progress(step=step + 1, num_tokens=10 * step))
        return self

    def save(self, progress):
        """Save, wait until the checkpoint is written, and return it."""
        self.saver(progress)
        self.saver.wait_for_writes()
        return self.saved[-1]

    def find(self):
        return find_checkpoint(
            self.folder, resume=self.section.resume, log=self.said.append, checksum_of=self.checksums.checksum
        )

    def resume(self):
        return resume_checkpoint(
            self.find(),
            access=self.access,
            run=self.fingerprint,
            allow_changes=self.section.allow_changes,
            log=self.said.append,
            checksums=self.checksums,
        )

    def everything(self):
        states = {
            f"{index}/{key}": value
            for index, state in self.optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }
        return {**self.model.state_dict(), **states}
