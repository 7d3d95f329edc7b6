"""The command `finetune launch ray` as a job: of a Ray cluster (`--submit`, Ray Jobs), or with a cluster, by KubeRay.

The entrypoint is `finetune launch ray` on Ray's head. `ray job stop` sends it SIGTERM, and SIGKILL after
RAY_JOB_STOP_WAIT_TIME_S, by default 3 s; the job's environment sets it to the time that the ranks have to save. The
RayJob is for the CRD rayjobs.ray.io/v1 of KubeRay 1.4 and later; pods of workers come and go, and the run continues.
"""

import asyncio
import copy
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.commands.launch.job_files import check_text
from finetune.commands.launch.ray import RayArguments, check_ray_job, read_limits
from finetune.commands.launch.ray_worker import PURPOSE
from finetune.errors import UserError
from finetune.launch.jobs import JobRequest
from finetune.launch.ray import HEAD_SETTINGS
from finetune.registry.accelerate_files import SHIPPED
from finetune.runtime.optional import require

STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
"""Ray reads it in the actor that starts the entrypoint (dashboard/modules/job/job_supervisor.py), in the job's
environment."""

STOP_MARGIN_SECONDS = 60
"""Time of the command after that of its ranks: it ends 30 s after `--stop` at the latest."""

DASHBOARD_PORT = 8265

_SECRETS = "Ray shows it on its dashboard. Export it as a variable where Ray is started on the hosts."


@dataclass(frozen=True)
class Submission:
    """The options of `--submit`, with their names on the command line."""

    working_dir: Path | None = None  # uploaded to the hosts; None: they share the folders of this one
    detach: bool = False


def submit_ray_job(arguments: RayArguments, submission: Submission) -> int:
    """Submit the job, follow its log unless `detach`, and return its exit code: 128 + SIGTERM if it was stopped.

    Raises UserError. The files that it reads are checked on Ray's head, which may have others than this host.
    """
    if arguments.local:
        raise UserError("--submit: --local starts Ray for one command alone. Name a cluster with --address.")
    job = check_ray_job(arguments, elsewhere=(Path("/"),))
    folder = submission.working_dir.absolute() if submission.working_dir is not None else None
    if folder is not None and job.run_folder.is_relative_to(folder):
        raise UserError(
            f"run.folder: {job.run_folder} is in --working-dir, and each host has a copy. Write a folder that all "
            "hosts share: --set run.folder=/PATH"
        )
    entrypoint = f"exec {shlex.join(ray_words(arguments, folder=folder))}"
    if folder is None:
        entrypoint = f"cd {shlex.quote(str(job.working_folder))} && {entrypoint}"
    check_text(entrypoint, source="the entrypoint", advice=_SECRETS, allows_secrets=False)
    environment: dict[str, Any] = {"env_vars": {STOP_WAIT: str(int(arguments.stop) + STOP_MARGIN_SECONDS)}}
    environment |= {"working_dir": str(folder)} if folder is not None else {}
    jobs, address = require("ray.job_submission", extra="ray", purpose=PURPOSE), arguments.address
    if address is not None and "://" not in address:
        address = f"http://{address if ':' in address else f'{address}:{DASHBOARD_PORT}'}"
    try:
        client = jobs.JobSubmissionClient(address)
        metadata = {"job_name": job.run_folder.name, "run_folder": str(job.run_folder)}
        identifier = client.submit_job(entrypoint=entrypoint, runtime_env=environment, metadata=metadata)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--submit: {address or 'the dashboard of this host'}: {str(error).splitlines()[0]} Name the host of Ray's "
            f"head, or the URL of its dashboard (port {DASHBOARD_PORT}), with --address."
        ) from error
    at = f"--address {client.get_address()}"
    print(f"submitted: {identifier}\n  log: ray job logs {at} --follow {identifier}\n  status: ray job status {at} "
          f"{identifier}\n  stop: ray job stop {at} {identifier}\nA stopped run saves first; submit the same command "
          "again to resume.", flush=True)  # fmt: skip
    if submission.detach:
        return 0

    async def print_log() -> None:
        async for text in client.tail_job_logs(identifier):
            print(text, end="", flush=True)

    try:
        asyncio.run(print_log())
        while not (details := client.get_job_info(identifier)).status.is_terminal():
            time.sleep(1.0)
    except KeyboardInterrupt:
        print(f"\nthe job continues; to stop it: ray job stop {at} {identifier}")
        return 128 + signal.SIGINT
    except (OSError, RuntimeError) as error:
        print(f"error: the log cannot be followed: {error} The job may continue: see its status.", file=sys.stderr)
        return 1
    print(f"job {identifier}: {details.status}", flush=True)
    if details.status == "STOPPED":
        return 128 + signal.SIGTERM
    if details.driver_exit_code is None:
        print(f"error: Ray has ended the job: {(details.message or '').splitlines()[0]}", file=sys.stderr)
        return 1
    return int(details.driver_exit_code)


def ray_words(arguments: RayArguments, *, folder: Path | None = None) -> list[str]:
    """Return the words of `finetune launch ray` on Ray's head; paths are relative to the folder, where one is named.

    Raises UserError for a file that is not in the folder.
    """
    words = ["python", "-m", "finetune", "launch", "ray"]
    for option, path in (("--config", arguments.config), ("--accelerate", arguments.accelerate)):
        if path.parent == SHIPPED:
            words += [option, path.stem]
        elif folder is None:
            words += [option, str(path.absolute())]
        elif path.absolute().is_relative_to(folder):
            words += [option, str(path.absolute().relative_to(folder))]
        else:
            raise UserError(f"{option} {path}: it is not in --working-dir {folder}, which is sent to the hosts.")
    words += ["--nodes", arguments.nodes, "--gpus-per-node", str(arguments.gpus_per_node)]
    words += [word for override in arguments.override for word in ("--set", override)]
    words += ["--stop", f"{arguments.stop:g}", "--max-failures", str(arguments.max_failures)]
    return [*words, "--cpu"] if arguments.cpu else words


Object = dict[str, Any]

_HEAD_RESOURCES = {"cpu": "2", "memory": "8Gi"}  # Ray's own processes and the command; ranks run on workers
_HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001}
_IDLE_SECONDS = 300
_LOG_SECONDS = 60  # the pods live on after the job, for its log

_SAVE = """\
import psutil, subprocess
ranks = [p for p in psutil.process_iter(["cmdline"]) if {{"finetune", "train"}} <= set(p.info["cmdline"] or [])]
for rank in ranks:
    rank.terminate()
psutil.wait_procs(ranks, timeout={seconds})
subprocess.run(["ray", "stop", "--force"])
"""
"""Run in a worker's pod before it is ended. Ray, and with it the container, ends after the ranks: Ray alone would start
ranks here again."""


@dataclass(frozen=True)
class Redis:
    """The external Redis in which Ray's head keeps its state, and the secret and key of its password."""

    address: str
    password: tuple[str, str] | None = None


def read_redis(address: str | None, secret: str | None) -> Redis | None:
    """Return what `--redis HOST:PORT` and `--redis-secret NAME:KEY` name; raises UserError."""
    if address is None:
        if secret is not None:
            raise UserError("--redis-secret: it is for --redis HOST:PORT, which is missing.")
        return None
    if not re.fullmatch(r"(rediss?://)?[A-Za-z0-9.-]+:\d{1,5}", address):
        raise UserError(f"--redis {address}: write HOST:PORT, such as redis.default.svc:6379.")
    if secret is None:
        return Redis(address)
    name, mark, key = secret.partition(":")
    if not mark or not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name) or not re.fullmatch(r"[\w.-]+", key):
        raise UserError(f"--redis-secret {secret}: write NAME:KEY, a secret and the key with the password.")
    return Redis(address, (name, key))


def ray_job_spec(request: JobRequest, arguments: RayArguments, *, pod: Object, redis: Redis | None) -> Object:
    """Return the spec of the RayJob. `pod` is that of a host with all its GPUs; the head's has the same but those."""
    least, most = read_limits(arguments.nodes)
    seconds = request.stop_seconds
    head, worker = copy.deepcopy(pod), copy.deepcopy(pod)
    (container,) = head["containers"]
    container["name"] = "ray-head"
    container["ports"] = [{"name": name, "containerPort": port} for name, port in _HEAD_PORTS.items()]
    container["resources"] = {"requests": dict(_HEAD_RESOURCES)}
    container["env"] += [{"name": f"RAY_{name}", "value": str(value)} for name, value in HEAD_SETTINGS.items()]
    (container,) = worker["containers"]
    container["name"] = "ray-worker"
    command = ["python", "-c", _SAVE.format(seconds=seconds)]
    container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
    cluster: Object = {
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0"},
            "template": {"spec": head},
        },
        "workerGroupSpecs": [
            {
                "groupName": "hosts",
                "replicas": least,
                "minReplicas": least,
                "maxReplicas": most,
                "rayStartParams": {"num-gpus" if request.uses_gpus else "num-cpus": str(request.ranks_per_node)},
                "template": {"spec": worker},
            }
        ],
    }
    if most > least:  # asks for pods up to the maximum; without it the job would wait for all of them
        cluster |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"idleTimeoutSeconds": _IDLE_SECONDS}}
    if redis is not None:
        password = redis.password and {"secretKeyRef": {"name": redis.password[0], "key": redis.password[1]}}
        cluster["gcsFaultToleranceOptions"] = {
            "redisAddress": redis.address,
            **({"redisPassword": {"valueFrom": password}} if password else {}),
        }
    return {
        "entrypoint": shlex.join(ray_words(arguments)),
        "submissionMode": "HTTPMode",  # a submitter's pod would have the shell read the entrypoint twice
        "runtimeEnvYAML": f'env_vars:\n  {STOP_WAIT}: "{seconds + STOP_MARGIN_SECONDS}"\n',
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": _LOG_SECONDS,
        "backoffLimit": request.max_restarts,
        "rayClusterSpec": cluster,
    }
