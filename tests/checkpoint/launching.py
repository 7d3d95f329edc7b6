"""Starts worker.py on several processes and reads what it found."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_WORKER = Path(__file__).with_name("worker.py")


def start(folder: Path, specs: list[dict[str, Any]], *, world: int = 2) -> dict[str, dict[str, Any]]:
    """Run the specs one after another on `world` processes; return each one's results by its name."""
    path = folder / "spec.json"
    base = {"is_spoilt": False, "save": []}
    written = [{**base, **spec, "results": str(folder / f"{spec['name']}.json")} for spec in specs]
    path.write_text(json.dumps(written))
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        number = port.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world}", f"--master_port={number}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*command, str(_WORKER), str(path)], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-8000:]
    return {spec["name"]: json.loads(Path(spec["results"]).read_text()) for spec in written}
