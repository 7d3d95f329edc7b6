"""`train`: in this process, one of a launch, or in fresh processes that it starts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from finetune.api.job import Job, JobLike, Overrides, api_function, as_job
from finetune.config.paths import local_run_folder
from finetune.errors import TrainingError, UserError
from finetune.launch.child import kill_child, start_child
from finetune.launch.ranks import find_ranks, is_launched
from finetune.registry.accelerate_files import find_accelerate_file
from finetune.run.state.finished import RunResult, read_error, read_run_result
from finetune.runtime.optional import lazily

with lazily():  # torch
    from finetune.run import in_process

_POLL_SECONDS = 0.2
_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGHUP)
"""Exit codes of a run that has saved a checkpoint after a signal."""


@api_function
def train(
    job: JobLike,
    *,
    overrides: Overrides | None = None,
    reporters: Iterable[Callable[[Any], object]] = (),
    num_processes: int | None = None,
    accelerate: str | PathLike[str] | None = None,
) -> RunResult:
    """Train the job, or resume the run that it started, and return how the run ended.

    In a script under `accelerate launch`, or a function under `accelerate.notebook_launcher`, every process calls it
    and gets the result. With `num_processes`, that many fresh processes are started here, never forked. `accelerate` is
    an accelerate file, or the name of one: `zero2`. `overrides` are values by dotted key, `reporters` functions that
    rank 0 calls with every event; one that raises is dropped with a warning.

    Raises errors of `finetune.errors`; nothing of this process is changed afterwards. Ctrl-C saves a checkpoint and
    raises KeyboardInterrupt; the same call resumes.
    """
    given = as_job(job)
    file = None if accelerate is None else find_accelerate_file(os.fspath(accelerate))
    watching = tuple(reporters)
    for reporter in watching:
        if not callable(reporter):
            raise UserError(f"reporters: `{type(reporter).__name__}` cannot be called. Give functions of one event.")
    if num_processes is not None:
        if watching:
            raise UserError("reporters: with num_processes, events are in other processes: read events.jsonl instead.")
        return _train_on_ranks(given, overrides or {}, num_processes=num_processes, accelerate_file=file)
    ranks = find_ranks(os.environ)
    return in_process.train_in_process(
        given.load(overrides),
        reporters=watching,
        accelerate_file=file,
        launch_variables={} if ranks is None else ranks.variables(),
    )


def _train_on_ranks(job: Job, overrides: Overrides, *, num_processes: int, accelerate_file: Path | None) -> RunResult:
    """Start the ranks by the command line, print their output, and return the result that they left in the folder."""
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise UserError(f"num_processes: {num_processes!r} is not a number of processes. Write 1 or more.")
    if is_launched(os.environ) or find_ranks(os.environ) is not None:
        raise UserError("num_processes: a launcher has started this process already. Leave num_processes out.")
    run = job.load(overrides).config.run
    file, texts = job.as_file(overrides, folder=local_run_folder(run.folder, run.local_folder))
    command = [sys.executable, "-m", "finetune", "train", "--config", str(file)]
    for text in texts:
        command += ["--set", text]
    if accelerate_file is not None:
        command += ["--accelerate", str(accelerate_file)]
    if num_processes > 1 or accelerate_file is not None:
        command += ["--processes", str(num_processes)]
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="finetune-") as scratch:
        log = Path(scratch) / "output"
        search_path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)  # the ranks find plugins, too
        process = start_child(command, log=log, environment={"PYTHONPATH": search_path})
        try:
            errors = _print_until_end(process, log)
        finally:
            kill_child(process)
    folder = local_run_folder(run.folder, run.local_folder)
    if process.returncode == 0 or process.returncode in _STOPPED:
        return read_run_result(folder)
    message = errors.removeprefix("error: ").strip() or f"the run ended with exit code {process.returncode}"
    kind = UserError if process.returncode == UserError.exit_code else TrainingError
    raise read_error(folder, since=started) or kind(message)


def _print_until_end(process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Print the output of the process until it ends, except for its error message, which is returned.

    Ctrl-C has the run save a checkpoint and stop, and is raised when it has; a second one kills it.
    """
    interrupt: KeyboardInterrupt | None = None
    error_lines: list[str] = []
    with log.open(encoding="utf-8", errors="replace") as output:
        while True:
            try:
                is_over = process.poll() is not None
                for line in output:
                    if error_lines or line.startswith("error: "):
                        error_lines.append(line)
                    else:
                        print(line, end="", flush=True)
                if is_over:
                    break
                time.sleep(_POLL_SECONDS)
            except KeyboardInterrupt as error:
                if interrupt is not None:
                    raise
                interrupt = error
                process.send_signal(signal.SIGTERM)
    if interrupt is not None:
        raise interrupt
    return "".join(error_lines)
