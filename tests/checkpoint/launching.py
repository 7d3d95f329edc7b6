"""Starts worker.py on several processes and reads what it found."""

import json
from pathlib import Path
from typing import Any

from tests.launching import run, torchrun_command

_SETTINGS = {"DS_ACCELERATOR": "cpu"}


def start(folder: Path, specs: list[dict[str, Any]], *, world: int = 2) -> dict[str, dict[str, Any]]:
    """Run the specs one after another on `world` processes; return each one's results by its name."""
    path, log = folder / "spec.json", folder / "worker.log"
    base = {"is_spoilt": False, "save": []}
    written = [{**base, **spec, "results": str(folder / f"{spec['name']}.json")} for spec in specs]
    path.write_text(json.dumps(written))
    command = torchrun_command("-m", "tests.checkpoint.worker", str(path), processes=world)
    code = run(command, log=log, timeout_seconds=900, environment=_SETTINGS)
    assert code == 0, log.read_text(errors="replace")[-10000:]
    return {spec["name"]: json.loads(Path(spec["results"]).read_text()) for spec in written}
