"""One resume in a process that starts for it: `python resume_worker.py ours|accelerate JOB FOLDER` prints its figures.

What is verified is begun as the product's command does it: when the job has been read, before torch is imported.
"""

import json
import sys
from pathlib import Path

from finetune.config.load import load_config
from finetune.run.state.preflight import prefetch_checksums
from finetune.runtime.optional import lazily

with lazily():
    from contest import resuming


def main(way: str, job: Path, folder: Path) -> None:
    loaded = load_config(job, [f"run.folder={json.dumps(str(folder))}"])
    ahead = prefetch_checksums(loaded) if way == "ours" else None  # before `resuming` is looked into, which imports it
    figures = resuming.ours(job, folder, ahead) if way == "ours" else resuming.accelerate(job, folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
