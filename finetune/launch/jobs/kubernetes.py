"""The objects of a job on Kubernetes: a JobSet, or a TrainJob of Kubeflow with its runtime, and the job's files."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.launch.jobs.host_script import host_script
from finetune.launch.jobs.request import PORT, JobRequest

JOBSET, TRAINJOB = "jobset", "trainjob"

_NODE = "node"
"""Name of the replicated job and of its container, as Kubeflow's own runtimes have it."""

_OVER = [1, 2, 126, 127, 130]
"""Exit codes after which no restart helps: `finetune launch next` has decided so, or there is no such program."""

_DECIDING_SECONDS = 30
"""After the save, for the decision whether to start again."""

_EXPANDED = re.compile(r"\$(?=[$(])")
"""What Kubernetes itself would expand in commands and values of variables."""

Object = dict[str, Any]


@dataclass(frozen=True)
class File:
    """A file of the job, which the container finds at the same path as here."""

    name: str  # in the ConfigMap
    path: str
    content: str


@dataclass(frozen=True)
class KubernetesOptions:
    """What the cluster is asked for."""

    kind: str  # JOBSET or TRAINJOB
    image: str
    files: tuple[File, ...]
    namespace: str | None = None
    claims: Mapping[str, str] = field(default_factory=dict)  # path in the container -> persistent volume claim
    secrets: tuple[str, ...] = ()  # whose keys become variables
    secret_keys: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # variable -> secret and key
    resources: Mapping[str, str] = field(default_factory=dict)  # cpu, memory, rdma/hca ...
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    runtime: str | None = None  # a ClusterTrainingRuntime of the cluster in place of our own
    max_starts: int = 100  # whatever the reason, those of machines that are taken away included


def kubernetes_objects(request: JobRequest, options: KubernetesOptions) -> list[Object]:
    """Return the objects in the order in which they are created."""
    files = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(request, options),
        "data": {file.name: file.content for file in options.files},
    }
    if options.kind == JOBSET:
        address = f"{request.name}-{_NODE}-0-0.{request.name}"
        command = _command(request, rank='"$JOB_COMPLETION_INDEX"', address=address, port=str(PORT))
        job_set = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(request, options),
            "spec": _job_set_spec(request, options, container={"command": command, **_run_of(request, options)}),
        }
        return [files, job_set]
    if options.runtime is not None:
        return [files, _train_job(request, options)]
    return [files, _training_runtime(request, options), _train_job(request, options)]


def _metadata(request: JobRequest, options: KubernetesOptions) -> Object:
    return {"name": request.name, **({"namespace": options.namespace} if options.namespace else {})}


def _training_runtime(request: JobRequest, options: KubernetesOptions) -> Object:
    spec = _job_set_spec(request, options, container={"image": options.image, **_secrets(options)})
    job = spec["replicatedJobs"][0]["template"]
    job["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    for name in ("parallelism", "completions", "completionMode"):  # Kubeflow sets them for the number of nodes
        del job["spec"][name]
    del spec["network"]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(request, options),
        "spec": {"mlPolicy": {"numNodes": request.num_nodes, "torch": {}}, "template": {"spec": spec}},
    }


def _train_job(request: JobRequest, options: KubernetesOptions) -> Object:
    command = _command(request, rank='"$PET_NODE_RANK"', address='"$PET_MASTER_ADDR"', port='"$PET_MASTER_PORT"')
    run = _run_of(request, options)
    trainer: Object = {
        "image": options.image,
        "command": command,
        "numNodes": request.num_nodes,
        "numProcPerNode": request.ranks_per_node,
        "env": run["env"],
        "resourcesPerNode": run["resources"],
    }
    own = options.runtime is None
    runtime_kind = "TrainingRuntime" if own else "ClusterTrainingRuntime"
    runtime_ref = {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime_kind,
        "name": request.name if own else options.runtime,
    }
    spec: Object = {"runtimeRef": runtime_ref, "trainer": trainer}
    if options.runtime is not None:
        spec["runtimePatches"] = [_patch(request, options)]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request, options),
        "spec": spec,
    }


def _patch(request: JobRequest, options: KubernetesOptions) -> Object:
    """Return what the cluster's runtime lacks: volumes, secrets' account, and time to save."""
    pod = _pod(request, options, container={})
    del pod["restartPolicy"]
    pod["containers"] = [{"name": _NODE, "volumeMounts": pod["containers"][0]["volumeMounts"]}]
    job = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {"manager": "finetune.launch/job", "trainingRuntimeSpec": {"template": template}}


def _job_set_spec(request: JobRequest, options: KubernetesOptions, *, container: Object) -> Object:
    over = {"name": "over", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    job = {
        "parallelism": request.num_nodes,
        "completions": request.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # one host cannot return alone: the JobSet starts all again
        "podFailurePolicy": {
            "rules": [
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"containerName": _NODE, "operator": "In", "values": _OVER}},
            ]
        },
        "template": {"spec": _pod(request, options, container=container)},
    }
    return {
        "failurePolicy": {"maxRestarts": options.max_starts - 1, "rules": [over]},
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
        **({"serviceAccountName": options.service_account} if options.service_account else {}),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        "volumes": volumes,
        "containers": [{"name": _NODE, **container, "volumeMounts": mounts}],
    }


def _run_of(request: JobRequest, options: KubernetesOptions) -> Object:
    """Return image, variables and resources of the container."""
    gpus = {options.gpu_resource: str(request.ranks_per_node)} if request.uses_gpus else {}
    amounts = {**options.resources, **gpus}
    variables: list[Object] = [{"name": name, "value": _unexpanded(text)} for name, text in request.variables().items()]
    variables += [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, (secret, key) in options.secret_keys.items()
    ]
    return {
        "image": options.image,
        "env": variables,
        **_secrets(options),
        "resources": {"requests": amounts, "limits": dict(amounts)} if amounts else {},
    }


def _secrets(options: KubernetesOptions) -> Object:
    """Return what makes variables of the keys of secrets."""
    return {"envFrom": [{"secretRef": {"name": name}} for name in options.secrets]} if options.secrets else {}


def _command(request: JobRequest, *, rank: str, address: str, port: str) -> list[str]:
    variables = {"MACHINE_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
    return ["/bin/sh", "-c", _unexpanded(host_script(request, variables))]


def _unexpanded(text: str) -> str:
    """Return the text so that Kubernetes, which expands `$(NAME)` and turns `$$` into `$`, leaves it as it was."""
    return _EXPANDED.sub("$$", text)
