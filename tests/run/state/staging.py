"""A run's folder with checkpoints that are whole, made without training; and storage whose every word is noted."""

from finetune.checkpoint.format.manifest import Manifest, RunFingerprint, file_checksum, write_manifest
from finetune.runtime.files.remote import RemoteFolder


def checkpoint(folder, step, *, content="", metrics=None):
    """Write a checkpoint that verifies and return its folder."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    (path / "model").mkdir(parents=True)
    (path / "model" / "0").write_text(f"weights {step} {content}")
    (path / "progress.json").write_text("{}")
    files = {name: file_checksum(path / name) for name in ("model/0", "progress.json")}
    run = RunFingerprint({}, {}, {})
    write_manifest(path, Manifest(step, run, metrics or {}, "", created=0.0, versions={}, files=files))
    return path


class NotedRemote(RemoteFolder):
    """Storage that notes what it is asked to do, and fails where it is told to."""

    def __init__(self, url):
        super().__init__(url)
        self.done = []
        self.failing = {}  # how often still, by a part of the name
        self.before_upload = lambda name: None

    def upload(self, path, name):
        self.before_upload(name)
        for part in self.failing:
            if part in name and self.failing[part] > 0:
                self.failing[part] -= 1
                raise ConnectionError("the line went dead")
        super().upload(path, name)
        self.done.append(f"+{name}")

    def delete(self, names):
        names = list(names)
        super().delete(names)
        self.done += [f"-{name}" for name in names]

    def checkpoints(self):
        """Return what is there of each checkpoint, by the name of its folder."""
        found = {}
        for name in sorted(self.sizes()):
            first, _, rest = name.partition("/")
            if first == "checkpoints":
                step, _, file = rest.partition("/")
                found.setdefault(step, []).append(file)
        return found
