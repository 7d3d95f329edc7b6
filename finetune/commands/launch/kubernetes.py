"""`finetune launch kubernetes`: a JobSet, a TrainJob or a RayJob, with the job's files in a ConfigMap."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.commands.launch.job_files import (
    INSIST,
    Destination,
    JobFileArguments,
    check_job,
    check_options,
    check_text,
    deliver,
    read_pairs,
    require_files,
    require_kept,
)
from finetune.commands.launch.ray import RayArguments, check_ray_job
from finetune.commands.launch.ray_submit import Redis, ray_job_spec, read_redis
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.config.load import LoadedConfig, read_text_file
from finetune.errors import UserError
from finetune.launch.jobs import PORT, JobRequest, host_script, yaml_text
from finetune.runtime.text.redact import redacted_yaml

JOBSET, TRAINJOB = "jobset", "trainjob"

_NODE = "node"
"""Name of the replicated job and of its container, as in Kubeflow's own runtimes."""

_FINAL_CODES = [1, 2, 126, 127, 130]
"""Exit codes without a restart: `finetune launch next` decided so, or the program does not exist."""

_DECIDING_SECONDS = 30
"""Time after the save for the decision whether to restart."""

_EXPANDED = re.compile(r"\$(?=[$(])")
"""References that Kubernetes itself expands in commands and values of variables."""

Object = dict[str, Any]


@dataclass(frozen=True)
class File:
    """A file of the job, which is mounted in the container at the same path as here."""

    name: str  # in the ConfigMap
    path: str
    content: str


_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = rf"{_LABEL}(\.{_LABEL})*"
_RESOURCE = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_AMOUNT = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MAX_FILE_BYTES = 200_000
"""Of the files together: a ConfigMap holds 1 MiB, and `kubectl apply` stores it in an annotation of 256 KiB."""

_COMMENT = """\
Written by `finetune launch kubernetes`. Submit it with `kubectl apply -f FILE`.
To continue a run whose job is over: `kubectl delete -f FILE`, and submit it again."""
_SECRETS = (
    "Create it with `kubectl create secret generic NAME --from-literal=KEY=...`, and write --secret NAME for variables "
    "of all its keys, or --secret VARIABLE=NAME:KEY for one (`secretKeyRef`)."
)
_MOUNT = "Mount a volume with --claim CLAIM:/PATH, or name a folder of the image with --in-image"


@dataclass(frozen=True)
class KubernetesArguments:
    """The options of Kubernetes, as they are typed."""

    image: str
    kind: str = JOBSET
    namespace: str | None = None
    claim: tuple[str, ...] = ()  # CLAIM:/PATH
    in_image: tuple[Path, ...] = ()
    secret: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()  # NAME=AMOUNT
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: tuple[str, ...] = ()  # LABEL=VALUE
    service_account: str | None = None
    runtime: str | None = None  # a ClusterTrainingRuntime of the cluster, in place of our own
    max_starts: int = 100  # for any reason, preemptions included
    ray: bool = False  # a RayJob, in place of the kind
    min_nodes: int | None = None  # of `--nodes MIN:MAX`: a RayJob continues on this number of hosts
    redis: str | None = None  # HOST:PORT of the state of Ray's head
    redis_secret: str | None = None  # NAME:KEY


@dataclass(frozen=True)
class KubernetesOptions:
    """The checked options, and the files of the job."""

    typed: KubernetesArguments
    files: tuple[File, ...]
    claims: Mapping[str, str]  # path in the container -> persistent volume claim
    secrets: tuple[str, ...]  # whose keys become variables
    secret_keys: Mapping[str, tuple[str, str]]  # variable -> secret and key
    resources: Mapping[str, str]  # cpu, memory, rdma/hca ...
    node_selector: Mapping[str, str]
    entrypoint: RayArguments  # of a RayJob
    redis: Redis | None


def launch_kubernetes(arguments: JobFileArguments, kubernetes: KubernetesArguments, destination: Destination) -> int:
    """Print, write or submit the objects, and return the exit code. Raises UserError, and ConfigError for the job."""
    destination = replace(destination, command=("kubectl", "apply", "-f"), advice=f"{_SECRETS} {INSIST}")
    check_options((arguments, kubernetes), advice=destination.advice, allows_secrets=destination.allow_secrets)
    claims = _read_claims(kubernetes.claim)
    folders = (*map(Path, claims), *kubernetes.in_image)
    request, loaded = check_job(replace(arguments, elsewhere=folders))
    require_kept(
        request, tuple(map(Path, claims)), advice="Mount a volume that all pods can write: --claim CLAIM:/PATH"
    )
    require_files(loaded, folders, advice=_MOUNT)
    _require_names(kubernetes)
    files = _job_files(arguments, loaded)
    for file in files:
        check_text(
            file.content,
            source=file.path,
            advice=destination.advice,
            allows_secrets=destination.allow_secrets,
            redact=redacted_yaml,
        )
    deepspeed = next((file.path for file in files if file.name == "deepspeed.json"), None)
    typed = [text for text in kubernetes.secret if "=" in text]
    secret_keys = {}
    for variable, secret in read_pairs(typed, option="--secret", noun="variable", name=_VARIABLE).items():
        name, _, key = secret.partition(":")
        if not re.fullmatch(_NAME, name) or not re.fullmatch(r"[A-Za-z0-9._-]+", key):
            raise UserError(f"--secret {variable}: write VARIABLE=NAME:KEY, a secret and one of its keys.")
        secret_keys[variable] = name, key
    resources = read_pairs(kubernetes.resource, option="--resource", noun="resource", name=_RESOURCE)
    for name, amount in resources.items():
        if not _AMOUNT.fullmatch(amount):
            raise UserError(f"--resource {name}={amount}: write an amount, such as cpu=16, memory=200Gi or rdma/hca=1.")
    options = KubernetesOptions(
        typed=kubernetes,
        files=files,
        claims=claims,
        secrets=tuple(name for name in kubernetes.secret if "=" not in name),
        secret_keys=secret_keys,
        resources=resources,
        node_selector=read_pairs(kubernetes.node_selector, option="--node-selector", noun="label", name=_RESOURCE),
        entrypoint=RayArguments(
            arguments.config,
            arguments.accelerate,
            nodes=f"{kubernetes.min_nodes or arguments.nodes}:{arguments.nodes}",
            gpus_per_node=arguments.gpus_per_node,
            override=arguments.override,
            cpu=arguments.cpu,
            stop=float(arguments.stop),
            max_failures=arguments.max_restarts,
        ),
        redis=read_redis(kubernetes.redis, kubernetes.redis_secret),
    )
    if kubernetes.ray:
        check_ray_job(options.entrypoint, elsewhere=folders)
    text = yaml_text(_objects(replace(request, deepspeed_file=deepspeed), options), comment=_COMMENT)
    return deliver(text, destination, name=request.name)


def _job_files(arguments: JobFileArguments, loaded: LoadedConfig) -> tuple[File, ...]:
    """Return the job, the accelerate file and its DeepSpeed config; raises UserError if they are too large."""
    values = read_accelerate_file(arguments.accelerate).values
    named = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    try:
        files = [
            File("job.yaml", str(arguments.config.absolute()), loaded.text),
            File("accelerate.yaml", str(arguments.accelerate.absolute()), read_text_file(arguments.accelerate)),
        ]
        if named is not None:
            files.append(File("deepspeed.json", str(Path(named).absolute()), read_text_file(Path(named))))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--accelerate {arguments.accelerate}: {named or 'the file'} cannot be read: {error}."
        ) from error
    if sum(len(file.content.encode()) for file in files) > _MAX_FILE_BYTES:
        raise UserError("--config: job, accelerate file and DeepSpeed config are too large for a ConfigMap.")
    for file in files:
        _require_path(file.path, option="--config and --accelerate")
    if len({file.path for file in files}) < len(files):
        raise UserError("--config and --accelerate: they are the same file.")
    return tuple(files)


def _read_claims(texts: Sequence[str]) -> dict[str, str]:
    """Return the persistent volume claim of each path; raises UserError."""
    claims: dict[str, str] = {}
    for text in texts:
        claim, mark, path = text.partition(":")
        if not mark or not re.fullmatch(_NAME, claim):
            raise UserError(f"--claim {text}: write CLAIM:/PATH, a persistent volume claim and its mount path.")
        _require_path(path, option=f"--claim {text}")
        if path in claims or path == "/dev/shm":
            raise UserError(f"--claim {text}: {path} is already a mount path.")
        claims[path] = claim
    return claims


def _require_path(path: str, *, option: str) -> None:
    if not path.startswith("/") or path == "/" or ":" in path or not path.isprintable() or ".." in Path(path).parts:
        raise UserError(f"{option}: {path!r} cannot be mounted in a container. Write an absolute path without `:`.")


def _require_names(arguments: KubernetesArguments) -> None:
    """Raise UserError for names that Kubernetes would refuse or misread."""
    if arguments.kind not in (JOBSET, TRAINJOB):
        raise UserError(f"--kind {arguments.kind}: write {JOBSET} or {TRAINJOB}.")
    if arguments.ray and arguments.kind != JOBSET:
        raise UserError(f"--kind {arguments.kind}: --ray prints a RayJob. Leave one of them out.")
    if not arguments.ray and (arguments.min_nodes, arguments.redis, arguments.redis_secret) != (None, None, None):
        raise UserError("--nodes MIN:MAX, --redis and --redis-secret are for a RayJob: add --ray, or leave them out.")
    if not arguments.image or not arguments.image.isprintable() or " " in arguments.image:
        raise UserError(f"--image {arguments.image!r}: write the name of an image, such as registry/finetune:cuda.")
    names = {
        "--namespace": arguments.namespace,
        "--service-account": arguments.service_account,
        "--runtime": arguments.runtime,
    }
    for option, name in [*names.items(), *(("--secret", secret) for secret in arguments.secret if "=" not in secret)]:
        if name is not None and not re.fullmatch(_NAME, name):
            raise UserError(f"{option} {name}: write a valid Kubernetes name: lowercase letters, digits, `-` and `.`.")
    if not re.fullmatch(_RESOURCE, arguments.gpu_resource):
        raise UserError(f"--gpu-resource {arguments.gpu_resource}: write a resource, such as nvidia.com/gpu.")
    if arguments.runtime is not None and arguments.kind != TRAINJOB:
        raise UserError("--runtime: only a TrainJob has one. Write --kind trainjob, or leave it out.")
    if arguments.runtime is not None and not all("=" in secret for secret in arguments.secret):
        raise UserError("--secret: the cluster's runtime accepts single variables only. Write VARIABLE=NAME:KEY.")


def _objects(request: JobRequest, options: KubernetesOptions) -> list[Object]:
    """Return the objects in the order in which they are created."""
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(request, options),
        "data": {file.name: file.content for file in options.files},
    }
    if options.typed.ray:
        pod = _pod(request, options, container=_run_of(request, options))
        ray_job = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": _metadata(request, options),
            "spec": ray_job_spec(request, options.entrypoint, pod=pod, redis=options.redis),
        }
        return [files, ray_job]
    if options.typed.kind == JOBSET:
        address = f"{request.name}-{_NODE}-0-0.{request.name}"
        command = _command(request, rank='"$JOB_COMPLETION_INDEX"', address=address, port=str(PORT))
        job_set = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(request, options),
            "spec": _job_set_spec(request, options, container={"command": command, **_run_of(request, options)}),
        }
        return [files, job_set]
    if options.typed.runtime is not None:
        return [files, _train_job(request, options)]
    spec = _job_set_spec(request, options, container={"image": options.typed.image, **_secrets(options)})
    job = spec["replicatedJobs"][0]["template"]
    job["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    for name in ("parallelism", "completions", "completionMode"):  # Kubeflow sets them for the number of nodes
        del job["spec"][name]
    del spec["network"]
    return [
        files,
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": _metadata(request, options),
            "spec": {"mlPolicy": {"numNodes": request.num_nodes, "torch": {}}, "template": {"spec": spec}},
        },
        _train_job(request, options),
    ]


def _metadata(request: JobRequest, options: KubernetesOptions) -> Object:
    return {"name": request.name, **({"namespace": options.typed.namespace} if options.typed.namespace else {})}


def _train_job(request: JobRequest, options: KubernetesOptions) -> Object:
    command = _command(request, rank='"$PET_NODE_RANK"', address='"$PET_MASTER_ADDR"', port='"$PET_MASTER_PORT"')
    run = _run_of(request, options)
    trainer: Object = {
        "image": options.typed.image,
        "command": command,
        "numNodes": request.num_nodes,
        "numProcPerNode": request.ranks_per_node,
        "env": run["env"],
        "resourcesPerNode": run["resources"],
    }
    own = options.typed.runtime is None
    runtime_kind = "TrainingRuntime" if own else "ClusterTrainingRuntime"
    runtime_ref = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime_kind,
        "name": request.name if own else options.typed.runtime,
    }
    spec: Object = {"runtimeRef": runtime_ref, "trainer": trainer}
    if options.typed.runtime is not None:
        spec["runtimePatches"] = [_patch(request, options)]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request, options),
        "spec": spec,
    }


def _patch(request: JobRequest, options: KubernetesOptions) -> Object:
    """Return the patch for the cluster's runtime: volumes, service account, and time to save."""
    pod = _pod(request, options, container={})
    del pod["restartPolicy"]
    pod["containers"] = [{"name": _NODE, "volumeMounts": pod["containers"][0]["volumeMounts"]}]
    job = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {"manager": "finetune.launch/job", "trainingRuntimeSpec": {"template": template}}


def _job_set_spec(request: JobRequest, options: KubernetesOptions, *, container: Object) -> Object:
    final = {"name": "over", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = {
        "parallelism": request.num_nodes,
        "completions": request.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a single host cannot be restarted: the JobSet restarts all of them
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _NODE, "operator": "In", "values": _FINAL_CODES},
                },
            ]
        },
        "template": {"spec": _pod(request, options, container=container)},
    }
    return {
        "failurePolicy": {"maxRestarts": options.typed.max_starts - 1, "rules": [final]},
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": request.name},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
    }


def _pod(request: JobRequest, options: KubernetesOptions, *, container: Object) -> Object:
    claims = {f"claim-{number}": claim for number, claim in enumerate(options.claims.items())}
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": name, "mountPath": path} for name, (path, _) in claims.items()]
    mounts += [{"name": "files", "mountPath": file.path, "subPath": file.name} for file in options.files]
    volumes: list[Object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    volumes += [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for name, (_, claim) in claims.items()]
    volumes.append({"name": "files", "configMap": {"name": request.name}})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.stop_seconds + _DECIDING_SECONDS,
        **({"serviceAccountName": options.typed.service_account} if options.typed.service_account else {}),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        "volumes": volumes,
        "containers": [{"name": _NODE, **container, "volumeMounts": mounts}],
    }


def _run_of(request: JobRequest, options: KubernetesOptions) -> Object:
    """Return image, variables and resources of the container."""
    gpus = {options.typed.gpu_resource: str(request.ranks_per_node)} if request.uses_gpus else {}
    amounts = {**options.resources, **gpus}
    variables: list[Object] = [{"name": name, "value": _unexpanded(text)} for name, text in request.variables().items()]
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in options.secret_keys.items()
    ]
    return {
        "image": options.typed.image,
        "env": variables,
        **_secrets(options),
        "resources": {"requests": amounts, "limits": dict(amounts)} if amounts else {},
    }


def _secrets(options: KubernetesOptions) -> Object:
    """Return the entry that makes the keys of secrets environment variables."""
    return {"envFrom": [{"secretRef": {"name": name}} for name in options.secrets]} if options.secrets else {}


def _command(request: JobRequest, *, rank: str, address: str, port: str) -> list[str]:
    variables = {"MACHINE_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    return ["/bin/sh", "-c", _unexpanded(host_script(request, variables))]


def _unexpanded(text: str) -> str:
    """Return the text so that Kubernetes, which expands `$(NAME)` and turns `$$` into `$`, leaves it as it was."""
    return _EXPANDED.sub("$$", text)
