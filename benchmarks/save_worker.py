"""One rank of benchmarks/save.py: builds what a job trains, makes the optimizer's state, and saves it in turn."""

import ctypes
import gc
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.checkpointer import Checkpointer
from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.sharding.access import build_access
from finetune.checkpoint.sharding.gather import agree_on_records
from finetune.checkpoint.sharding.save_plan import ROUND_BYTES, assign_tensors
from finetune.checkpoint.sharding.state_access import StateAccess
from finetune.config.load import load_config
from finetune.config.sections.checkpoint import CheckpointSection
from finetune.report.run_log import RunLog
from finetune.run.build.data import make_run_plan, make_training_data
from finetune.run.build.prepared_model import PreparedModel, make_accelerator, prepare_model
from finetune.run.train import launched_strategy
from finetune.runtime import distributed
from finetune.runtime.text.library_output import quiet_libraries

WAYS = ("sync", "async", "accelerate")


def main(config: Path, folder: Path, rounds: int) -> None:
    quiet_libraries(is_main=False)
    machine = build(config)
    train_one_step(machine)
    access = build_access(machine.accelerator, machine.model, machine.optimizer)
    facts = measure_memory(access, folder)
    savers = {way: saver(access, folder / way, way == "async") for way in WAYS[:2]}
    for each in savers.values():
        each.rehearse(num_saves=rounds)  # memory for the copies is there before the clock runs, as in a run
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for number in range(1, rounds + 1):
        for turn in range(len(WAYS)):
            way = WAYS[(turn + number) % len(WAYS)]  # nobody is always the first
            distributed.barrier()  # all begin at the same time
            if way == "accelerate":
                times[way].append(save_by_accelerate(machine, folder / way))
            else:
                saved = savers[way].save(number, progress={"step": number})
                times[way].append((saved.stall_seconds, saved.seconds))
    (folder / f"rank-{distributed.rank()}.json").write_text(json.dumps({**facts, "times": times}))
    distributed.shut_down(0)


def build(path: Path) -> PreparedModel:
    loaded, say = load_config(path), RunLog(is_main=False)
    strategy = launched_strategy(loaded)
    lessons = make_training_data(loaded.config, say)
    plan = make_run_plan(loaded.config, lessons)
    accelerator = make_accelerator(loaded.config, strategy)
    return prepare_model(
        loaded.config,
        strategy,
        accelerator=accelerator,
        training_data=lessons,
        learning_rate=plan.schedule.peak,
        log=say,
    )


def train_one_step(machine: PreparedModel) -> None:
    """Take a step, so that there is optimizer state."""
    tokens = torch.randint(0, 100, (1, 16), device=machine.accelerator.device)
    machine.accelerator.backward(machine.model(input_ids=tokens, labels=tokens).loss)
    machine.optimizer.step()
    machine.optimizer.zero_grad()


def saver(access: StateAccess, folder: Path, asynchronous: bool) -> Checkpointer:
    section = CheckpointSection(asynchronous=asynchronous)
    return Checkpointer(folder, section=section, access=access, run=RunFingerprint({}, {}, {}), log=print)


def measure_memory(access: StateAccess, folder: Path) -> dict[str, Any]:
    """Return what a rank takes beyond what it had, for the first save of each kind, and what it may take."""
    records = agree_on_records(access)
    share = sum(record.size_bytes for record in assign_tensors(records, world=distributed.world())[distributed.rank()])
    largest = max(record.size_bytes for record in records)
    facts: dict[str, Any] = {"state": sum(record.size_bytes for record in records), "share": share, "largest": largest}
    facts["bound"] = {"round": max(ROUND_BYTES, largest), "share and largest": share + largest}
    warm_up = saver(access, folder / "warm-up", False)
    warm_up.save(1, progress={})  # imports, connections and arenas of the allocator are not the save's
    facts["extra"] = {}
    for way in WAYS[:2]:
        each = saver(access, folder / f"memory-{way}", way == "async")
        facts["extra"][way] = extra_bytes(lambda each=each: each.save(1, progress={}))
        shutil.rmtree(folder / f"memory-{way}", ignore_errors=True)
        distributed.barrier()  # the next begins when rank 0 has cleared up
    return facts


def extra_bytes(act: Callable[[], object]) -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what was freed before would serve this save, uncounted
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    act()
    return status("VmHWM") - before


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def save_by_accelerate(machine: PreparedModel, folder: Path) -> tuple[float, float]:
    if distributed.is_main():
        shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()  # nobody writes into what is being deleted
    started = time.monotonic()
    machine.accelerator.save_state(str(folder))
    distributed.barrier()  # `save_state` ends without one
    seconds = time.monotonic() - started
    return seconds, seconds


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
