"""How long training waits for a save, how long a save takes, and how much memory it takes, strategy by strategy.

    python benchmarks/save.py [--places single,ddp:2,fsdp2:2,zero2:2,zero3:2] [--rounds 5] [--layers 2] [--folder DIR]

A model with 500 MB of parameters and AdamW state (fp32) is saved in turn by finetune while training waits, by finetune
behind training, and by Accelerate's `save_state`, which neither syncs to the disk nor digests nor verifies. Ratios are
medians over rounds of one run. Memory is what a rank's resident memory peaks at beyond what it had before its first
save, beside what it may take: its share of the state and the largest tensor. One that streams needs a round of tensors
at a time, and the allocator may keep the round before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tiny_job import JOB, write_job

from finetune.runtime.amounts import size_text
from finetune.runtime.processes import free_port

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).with_name("save_worker.py")
SIZES = "{hidden_size: 1024, intermediate_size: 6016, num_hidden_layers: %d, num_attention_heads: 8"


def main() -> int:
    """Measure every place, print the table, and return 1 where one could not be measured."""
    options, code = _options(), 0
    table = Table(
        *("place", "state", "sync", "async stall", "sync / async", "async total", "save_state", "save_state / async"),
        *("one round", "memory sync", "memory async", "share + largest"),
        title="A save: seconds that training waits, and memory per rank",
    )
    with tempfile.TemporaryDirectory(prefix="finetune-save-", dir=options.folder) as scratch:
        for place in options.places.split(","):
            told = _measure(place, Path(scratch) / place.replace(":", "-"), options)
            if told is None:
                code = 1
                continue
            table.add_row(place, *_row(told))
    Console(width=170).print(table)
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default="single,ddp:2,fsdp2:2,zero2:2,zero3:2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=2, help="of 21 million parameters, 250 MB of state, each")
    parser.add_argument("--folder", help="where to write; a folder of its own in it is made and removed")
    return parser.parse_args()


def _measure(place: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Return what each rank has measured."""
    job = write_job(folder)
    text = JOB.replace("{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4", "%s")
    job.write_text(text % (SIZES % options.layers))
    strategy, _, processes = place.partition(":")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", processes or "1"]
    command += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
    command += ["--main_process_port", str(free_port())]
    command += [str(WORKER), str(job), str(folder), str(options.rounds)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = folder / "log"
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT).returncode
    found = sorted(folder.glob("rank-*.json"))
    if code != 0 or not found:
        print(f"{place}: exit code {code}\n{log.read_text(errors='replace')[-4000:]}")
        return None
    return [json.loads(path.read_text()) for path in found]


def _row(told: list[dict[str, Any]]) -> list[str]:
    times = told[0]["times"]
    stall = {way: [waited for waited, _ in rounds] for way, rounds in times.items()}
    total = median(seconds for _, seconds in times["async"])
    worst = {way: max(each["extra"][way] for each in told) for way in ("sync", "async")}
    bound = {name: max(each["bound"][name] for each in told) for name in told[0]["bound"]}
    return [
        size_text(told[0]["state"]),
        f"{median(stall['sync']):.2f}",
        f"{median(stall['async']):.3f}",
        _ratio(stall["sync"], stall["async"]),
        f"{total:.2f}",
        f"{median(stall['accelerate']):.2f}",
        _ratio(stall["accelerate"], stall["async"]),
        *map(size_text, (bound["round"], worst["sync"], worst["async"], bound["share and largest"])),
    ]


def _ratio(above: list[float], below: list[float]) -> str:
    return f"{median(a / b for a, b in zip(above, below, strict=True)):.1f}"


if __name__ == "__main__":
    sys.exit(main())
