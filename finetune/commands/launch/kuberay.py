"""A RayJob of KubeRay, which runs `finetune launch ray` on Ray's head: pods of workers come and go, the run continues.

Written for the CRD rayjobs.ray.io/v1 of KubeRay 1.4 and later.
"""

import copy
import re
import shlex
from dataclasses import dataclass
from typing import Any

from finetune.commands.launch.ray import RayArguments, read_limits
from finetune.commands.launch.ray_submit import STOP_MARGIN_SECONDS, STOP_WAIT, ray_words
from finetune.errors import UserError
from finetune.launch.jobs import JobRequest
from finetune.launch.ray import HEAD_SETTINGS

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
