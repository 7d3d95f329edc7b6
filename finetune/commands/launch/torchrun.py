"""`finetune launch torchrun` and `finetune train --processes N`: the command of each host, and ranks started here."""

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.commands.launch.job_files import check_text, require_shared_batch
from finetune.commands.rehearse.accelerate_file import data_parallel_size, read_accelerate_file
from finetune.config.load import LoadedConfig, load_config, require_divisible_batch
from finetune.config.paths import is_url, local_run_folder
from finetune.errors import TrainingError, UserError
from finetune.launch.jobs import LaunchJob, launch_command
from finetune.launch.local import run_ranks
from finetune.launch.ranks import is_launched
from finetune.runtime.supervision.on_end import run_if_pending
from finetune.runtime.supervision.status import FINISHED, STATUS_FILE, STOPPED, read_status
from finetune.runtime.text.terminal import write_file_to_stdout

_SECRETS = "Export it as a variable on each host."


def print_commands(job: LaunchJob, loaded: LoadedConfig, *, num_hosts: int) -> None:
    """Print the command of each host. Raises UserError if it would hold a secret or an invisible character."""
    file = read_accelerate_file(job.accelerate_file)
    require_shared_batch(loaded, file, world=num_hosts * job.ranks_per_host, num_nodes=num_hosts)
    text = ""
    for rank in range(num_hosts):
        words = launch_command(job, num_hosts=num_hosts, rank=rank, address="HOST0_ADDRESS")
        text += f"# on HOST{rank}\n{shlex.join(['accelerate', 'launch', *words[3:]])}\n"
    check_text(text, source="the command", advice=_SECRETS)
    write_file_to_stdout(text)


def train_on_ranks(config: Path, overrides: Sequence[str], *, num_processes: int, accelerate_file: Path | None) -> int:
    """Train the job, distributed as the accelerate file says, else with DDP, and return the exit code.

    A mistake in the job or in the accelerate file is raised before any process is started.
    """
    if is_launched(os.environ):
        raise UserError("--processes: a launcher has started this process already. Leave --processes out.")
    loaded = load_config(config, overrides)
    size = num_processes
    if accelerate_file is not None:
        size = data_parallel_size(accelerate_file, num_processes=num_processes)
    require_divisible_batch(loaded, num_processes=size)
    words = ["-m", "finetune", "train", "--config", str(config)]
    words += [word for override in overrides for word in ("--set", override)]
    if accelerate_file is not None:
        words += ["--accelerate", str(accelerate_file)]
    started = time.time()
    code = run_ranks(words, num_processes=num_processes)
    run_end_command(loaded, since=started, exit_code=code)
    run = loaded.config.run
    state = read_status(local_run_folder(run.folder, run.local_folder)).get("state")
    if code == 0 and state not in (FINISHED, STOPPED):
        raise TrainingError(
            f"the processes ended with exit code 0 before the run did ({STATUS_FILE}: {state}): code of a plugin or a "
            "library has ended them. Find its `os._exit`."
        )
    return code


def run_end_command(loaded: LoadedConfig, *, since: float, exit_code: int) -> None:
    """Run the command of `run.on_end`, if rank 0 of the run that began `since` then has not done so."""
    run = loaded.config.run
    url = run.folder if is_url(run.folder) else ""
    folder = local_run_folder(run.folder, run.local_folder).absolute()
    run_if_pending(run.on_end, folder, since=since, exit_code=exit_code, url=url)
