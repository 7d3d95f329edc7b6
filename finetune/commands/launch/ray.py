"""`finetune launch ray`: the job on the hosts of a Ray cluster, which come and go, with Ray Train's elastic trainer.

`DataParallelTrainer` is TorchTrainer without its process group among the workers. A group of theirs would be a second
one next to that of the ranks, with GPU memory of its own, and its destruction waits 30 s for the peers of a lost host.
"""

import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.launch.attempt_end import USER_MISTAKE, newest_step
from finetune.commands.launch.job_files import require_shared_batch
from finetune.commands.launch.ray_worker import (
    PURPOSE,
    RAY_FOLDER,
    RankFailed,
    RankJob,
    RunControl,
    read_metrics,
    run_worker,
)
from finetune.commands.launch.torchrun import run_end_command
from finetune.commands.rehearse.accelerate_file import AccelerateFile, read_accelerate_file, with_copies_for
from finetune.config.load import LoadedConfig, load_config
from finetune.config.paths import is_url, local_run_folder
from finetune.errors import UserError
from finetune.runtime.optional import require

RESIZE_SECONDS = 30.0
"""How often Ray looks for hosts that have come."""

WORKER_SETTINGS = {
    # How long Ray waits for the hosts of a new group of workers. When a host is lost it first asks for as many workers
    # as before, and waits for them; its default of 60 s is most of what a lost host costs.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    # A worker that does not answer, on a host that is suspended or cut off; the default is 10 minutes.
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "30",
    # Ranks of a host see all its GPUs and take that of LOCAL_RANK, as under torchrun.
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "1",
    # A worker that ends would kill its rank at once; without it the kernel sends the rank SIGTERM, and it saves.
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # prints each line twice
    "RAY_DEDUP_LOGS": "0",  # would leave out lines of ranks that look alike
    "RAY_COLOR_PREFIX": "0",  # would write an escape sequence before each line
}
"""Variables of Ray Train; variables that the user has set count."""

HEAD_SETTINGS = {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000, "health_check_failure_threshold": 3}
"""Settings of Ray's head: after how long a host counts as lost, here 3 to 12 s, by default 15 to 60 s.

`--local` sets them. A cluster is given them when its head is started: `RAY_health_check_period_ms=1000 ... ray start`.
"""

_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 1.0
_GIVE_UP_SECONDS = 30.0  # after the time to save: Ray may be waiting for hosts, with no worker that could end


@dataclass(frozen=True)
class RayArguments:
    """The options of `finetune launch ray`, with their names on the command line."""

    config: Path
    accelerate: Path
    nodes: str
    gpus_per_node: int
    override: tuple[str, ...] = ()
    address: str | None = None
    local: bool = False
    cpu: bool = False
    stop: float = 180.0
    max_failures: int = 10


def read_limits(nodes: str) -> tuple[int, int]:
    """Return the least and the most hosts, from `2` or `1:4`. Raises UserError.

    >>> read_limits("1:4")
    (1, 4)
    """
    match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", nodes)
    if match is None:
        raise UserError(f"--nodes {nodes}: write a number of hosts, `2`, or the least and the most, `1:4`.")
    least, most = int(match[1]), int(match[2] or match[1])
    if not 1 <= least <= most:
        raise UserError(f"--nodes {nodes}: write at least 1, and the smaller number first.")
    return least, most


def fitting_worlds(loaded: LoadedConfig, file: AccelerateFile, *, least: int, most: int) -> tuple[int, ...]:
    """Return the numbers of ranks that can share the batch. Raises ConfigError or StrategyError if there is none.

    With HSDP the number of copies follows from that of the ranks.
    """
    worlds: list[int] = []
    for world in range(most, least - 1, -1):
        try:
            require_shared_batch(loaded, with_copies_for(file, world), world=world)
        except UserError:
            if world == least and not worlds:
                raise
        else:
            worlds.append(world)
    return tuple(reversed(worlds))


def failure_limit(train: Any, run_folder: Path, *, max_failures: int) -> Any:
    """Return a callback of Ray that ends the run after more failures in a row without a checkpoint of a later step."""

    class FailureLimit(train.UserCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self._failures, self._step = 0, newest_step(run_folder)

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            step = newest_step(run_folder)
            self._failures = 1 if step > self._step else self._failures + 1
            self._step = step
            if self._failures > max_failures:
                last = next(iter(worker_exceptions.values()))
                raise RankFailed(f"{self._failures} failures in a row made no progress; the last one: {last}")

    return FailureLimit()


def launch_ray(arguments: RayArguments) -> int:
    """Run the job on a Ray cluster, and return the exit code of the run. Raises UserError before anything starts."""
    if arguments.local and arguments.address is not None:
        raise UserError("--local starts Ray on this machine, and --address names a cluster. Leave one of them out.")
    least, most = (nodes * arguments.gpus_per_node for nodes in read_limits(arguments.nodes))
    loaded, started = load_config(arguments.config, arguments.override), time.time()
    worlds = fitting_worlds(loaded, read_accelerate_file(arguments.accelerate), least=least, most=most)
    run = loaded.config.run
    if is_url(run.folder) and run.local_folder is None:
        raise UserError("run.local_folder: is not set. A run at a URL needs a folder that all hosts share here.")
    run_folder = local_run_folder(run.folder, run.local_folder).absolute()
    words = ["-m", "finetune", "train", "--config", str(arguments.config)]
    words += [word for override in arguments.override for word in ("--set", override)]
    job = RankJob(tuple(words), arguments.accelerate, Path.cwd(), run_folder, worlds, arguments.stop)
    ray = _connect(arguments, num_ranks=most)
    if len(worlds) < most - least + 1:
        _log(f"the batch can be shared by {', '.join(map(str, worlds))} processes; other numbers are left out")
    try:
        code = _run(arguments, job)
    finally:
        ray.shutdown()
    run_end_command(loaded, since=started, exit_code=code)
    _log("; ".join([f"exit code {code}", *(f"{name} {value}" for name, value in read_metrics(run_folder).items())]))
    return code


def _connect(arguments: RayArguments, *, num_ranks: int) -> Any:
    """Return Ray after joining the cluster, or starting it here for this number of ranks. Raises UserError."""
    settings = {name: os.environ.get(name, value) for name, value in WORKER_SETTINGS.items()}
    os.environ.update(settings)  # Ray reads some when it is imported here
    ray = require("ray", extra="ray", purpose=PURPOSE)
    require("ray.train", extra="ray", purpose=PURPOSE)
    options: dict[str, Any] = {"runtime_env": {"env_vars": settings}}
    address = arguments.address
    try:
        if arguments.local:
            num_gpus = None if arguments.cpu else num_ranks
            ray.init("local", num_cpus=num_ranks, num_gpus=num_gpus, _system_config=HEAD_SETTINGS, **options)
        elif address is None:  # that of RAY_ADDRESS, or of this machine's cluster
            ray.init("auto", **options)
        else:
            address = address if ":" in address else f"{address}:6379"
            if "://" not in address:  # Ray itself would try for minutes, with a line every 5 s
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            ray.init(address, **options)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].removesuffix(".")
        raise UserError(
            f"{address or 'the cluster of this machine'}: Ray cannot be reached: {reason}. Start it with `ray start "
            "--head`, or name the host of the cluster's head."
        ) from error
    return ray


def _run(arguments: RayArguments, job: RankJob) -> int:
    """Run the trainer in a thread, pass signals on to the ranks, and return the exit code of the run."""
    ray, train = (require(name, extra="ray", purpose=PURPOSE) for name in ("ray", "ray.train"))
    trainers = require("ray.train.v2.api.data_parallel_trainer", extra="ray", purpose=PURPOSE)
    schedule = require("ray.util.scheduling_strategies", extra="ray", purpose=PURPOSE).NodeAffinitySchedulingStrategy
    # On this host: workers take the loss of this actor for that of the command.
    here = schedule(ray.get_runtime_context().get_node_id(), soft=False)
    control = ray.remote(num_cpus=0)(RunControl).options(scheduling_strategy=here).remote()
    trainer = trainers.DataParallelTrainer(
        run_worker,
        train_loop_config={"job": job, "control": control},
        scaling_config=train.ScalingConfig(
            num_workers=(job.worlds[0], job.worlds[-1]),
            use_gpu=not arguments.cpu,
            elastic_resize_monitor_interval_s=RESIZE_SECONDS,
        ),
        run_config=train.RunConfig(
            name=f"{job.run_folder.name}-{int(time.time())}",
            storage_path=str(job.run_folder / RAY_FOLDER),
            logging_config=train.LoggingConfig(log_level="CRITICAL"),  # a traceback for each lost host
            failure_config=train.FailureConfig(max_failures=-1),
            callbacks=[failure_limit(train, job.run_folder, max_failures=arguments.max_failures)],
        ),
    )
    results: list[Any] = []
    thread = threading.Thread(target=_fit, args=(trainer, results), daemon=True)
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: received.append(number))
    thread.start()
    hosts, give_up_at = _hosts(ray), float("inf")
    while thread.is_alive():
        thread.join(timeout=_POLL_SECONDS)
        if received and give_up_at == float("inf"):
            _log(f"{signal.Signals(received[0]).name}: the ranks save and end; a second signal ends this command now")
            ray.get(control.request_stop.remote())
            give_up_at = time.monotonic() + job.stop_seconds + _GIVE_UP_SECONDS
        if len(received) > 1 or time.monotonic() > give_up_at:
            return 128 + received[0]
        if (now := _hosts(ray)) != hosts:
            for identifier in sorted(hosts.keys() ^ now.keys()):
                change = "came" if identifier in now else "is lost; the run continues on the others"
                _log(f"host {(hosts | now)[identifier]} {change}")
            hosts = now
            # Ray's coordinator looks at the hosts every 20 s, and asks for lost ones until then. Ray 2.60 has no
            # setting for it; without this actor or its method, the next workers start up to 20 s later.
            with suppress(ValueError, AttributeError, TypeError, ray.exceptions.RayError):
                coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
                ray.get(coordinator.get_reserved_resources.remote("", recompute=True), timeout=5)
    code = exit_code_of(results[0])
    return 128 + received[0] if received and code == 128 + signal.SIGTERM else code


def _fit(trainer: Any, results: list[Any]) -> None:
    """Append the exit code of the run, or the error with which Ray gave it up."""
    try:
        results.append(trainer.fit().return_value)
    except Exception as error:  # Ray has several
        results.append(error)


def exit_code_of(result: Any) -> int:
    """Return the exit code of the run, after printing the reason for which Ray gave it up."""
    if not isinstance(result, BaseException):
        return int(result)
    reason = str(getattr(result, "controller_failure", result)).strip()
    host, missing = re.search(r"\bip=([^,)]+)", reason), re.search(r"^ModuleNotFoundError: (.+)", reason, re.MULTILINE)
    if host is not None and missing is not None:  # a worker cannot read the files of its job
        print(f"error: host {host[1]}: {missing[1]}. Ranks run in the Python with which Ray was started on their host: "
              "install the same packages there.", file=sys.stderr, flush=True)  # fmt: skip
        return USER_MISTAKE
    print(f"error: Ray has ended the run: {reason.splitlines()[0]}", file=sys.stderr, flush=True)
    return 1


def _hosts(ray: Any) -> dict[str, str]:
    """Return the addresses of the cluster's hosts, by their numbers in Ray."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


def _log(line: str) -> None:
    print(f"finetune: {line}", flush=True)
