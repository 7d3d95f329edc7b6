"""One resume in a process that starts for it: `python -m comparison.resume_worker ours|accelerate JOB FOLDER`.

What is verified is begun as the product's command does it: when the job has been read, before torch is imported.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from finetune.config.load import load_config
from finetune.run.start import prefetch_checksums
from finetune.runtime.optional import lazily

with lazily():
    from comparison import product


def ours(job: Path, folder: Path) -> dict[str, Any]:
    """Return how long it takes to find, verify and load the newest checkpoint, once the model is built."""
    prefetched = prefetch_checksums(
        load_config(job, [f"run.folder={json.dumps(str(folder))}"])
    )  # before torch is imported
    built = product.build(job)
    started = time.perf_counter()
    built.resume(folder / "checkpoints", checksums=prefetched)
    return {"seconds": time.perf_counter() - started, "checksum": built.checksum()}


def accelerate(job: Path, folder: Path) -> dict[str, Any]:
    """Return how long `load_state` takes, which verifies nothing."""
    built = product.build(job)
    started = time.perf_counter()
    built.prepared.accelerator.load_state(str(folder / "accelerate"))
    return {"seconds": time.perf_counter() - started, "checksum": built.checksum()}


if __name__ == "__main__":
    print(json.dumps({"ours": ours, "accelerate": accelerate}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))))
