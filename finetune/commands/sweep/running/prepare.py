"""The data is tokenized once, before the runs that share it: none of them waits for another one's lock."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from finetune.commands.sweep.plan.grid import LOGS_FOLDER, SweepRun, data_facts
from finetune.commands.sweep.plan.launch import VISIBLE_DEVICES, LaunchPlan
from finetune.commands.sweep.running.process import Start, StopSignals, last_message
from finetune.commands.sweep.running.schedule import POLL_SECONDS
from finetune.config.load import LoadedConfig

_WORD = ("-m", "finetune", "prepare")


def shared_data(runs: Iterable[SweepRun], loaded: Mapping[str, LoadedConfig]) -> list[list[SweepRun]]:
    """Return the runs that read the same tokenized data, for each such data that several of them read."""
    groups: dict[object, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(data_facts(loaded[run.name].config), []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def prepare_data(
    group: Sequence[SweepRun], *, number: int, plan: LaunchPlan, folder: Path, stop: StopSignals, start: Start
) -> str | None:
    """Run `finetune prepare` for the first run of a group; return the message of a failure, None for a success."""
    words = [word for override in group[0].overrides for word in ("--set", override)]
    log = folder / LOGS_FOLDER / f"prepare-{number}.log"
    command = [sys.executable, *_WORD, "--config", str(plan.job), *words]
    process = start(command, log, {VISIBLE_DEVICES: ""})
    signalled = False
    while (code := process.poll()) is None:
        if stop.first is not None and not signalled:
            signalled = True
            process.send_signal(stop.first)
        time.sleep(POLL_SECONDS)
    if code == 0 or stop.first is not None:
        return None
    return last_message(log) or f"`finetune prepare` ended with exit code {code}; see {log}"
