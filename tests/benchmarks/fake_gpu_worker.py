"""A worker that computes forever in a process that it starts, once it is its turn."""

import json
import subprocess
import sys
from pathlib import Path

from gpu_comparison.turns import connected, wait_for_turn

if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    listen, speak = connected()
    wait_for_turn(listen, speak)
    child = subprocess.Popen(["sleep", "300"])
    (Path(spec["folder"]) / "child").write_text(str(child.pid))
    child.wait()
    print(json.dumps({"error": "it went on alone"}), file=speak, flush=True)
