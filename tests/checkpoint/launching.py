"""Starts worker.py on several processes and reads what it found."""

import json
import sys
from pathlib import Path
from typing import Any

from finetune.runtime.processes import free_port, run_process_group

_WORKER = Path(__file__).with_name("worker.py")
_SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}


def start(folder: Path, specs: list[dict[str, Any]], *, world: int = 2) -> dict[str, dict[str, Any]]:
    """Run the specs one after another on `world` processes; return each one's results by its name."""
    path, log = folder / "spec.json", folder / "worker.log"
    base = {"is_spoilt": False, "save": []}
    written = [{**base, **spec, "results": str(folder / f"{spec['name']}.json")} for spec in specs]
    path.write_text(json.dumps(written))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}"]
    command += [f"--master_port={free_port()}", str(_WORKER), str(path)]
    code = run_process_group(command, log=log, timeout_seconds=900, environment=_SETTINGS)
    assert code == 0, log.read_text(errors="replace")[-10000:]
    return {spec["name"]: json.loads(Path(spec["results"]).read_text()) for spec in written}
