"""One digest of a training state: equal for two checkpoints that a run would continue from in the very same way."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def state_digest(
    index: Mapping[str, Mapping[str, Any]], *, scalars: Mapping[str, Mapping[str, Any]], step: int, samples: str
) -> str:
    """Return the SHA-256 over what a checkpoint is of; ranks, strategy, files and their order make no difference.

    `index` and `scalars` are what the files of these names hold, `samples` is the progress's `samples_sha256`. Lines:
    `name dtype shape sha256` of each tensor, by name; then `step` and every number of optimizer and loss scale.
    """
    lines = [
        f"{name} {entry['dtype']} {list(entry['shape'])} {entry['sha256']}" for name, entry in sorted(index.items())
    ]
    optimizer = {name: _numbers(values) for name, values in scalars["optimizer"].items()}
    rest = {"optimizer": optimizer, "loss_scale": _numbers(scalars["loss_scale"]), "step": step, "samples": samples}
    lines.append(json.dumps(rest, sort_keys=True))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers as floats: what counts in whole numbers here does so in floats under another strategy."""
    return {name: float(value) for name, value in values.items()}
