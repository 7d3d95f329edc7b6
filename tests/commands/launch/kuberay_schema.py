"""The schema of a RayJob (rayjobs.ray.io/v1), without its pods, for which Kubernetes has a schema.

Taken from the Go types of KubeRay 1.4, of which its CRD is generated: ray-operator/apis/ray/v1/rayjob_types.go and
raycluster_types.go. A type that is not optional in Go is required here. `pod` stands for a PodTemplateSpec.
"""

from typing import Any

import jsonschema
import kubernetes_validate

KUBERNETES = "1.34"

_TYPES: dict[str, dict[str, str]] = {
    "RayJobSpec": {
        "activeDeadlineSeconds": "integer",
        "backoffLimit": "integer",
        "rayClusterSpec": "RayClusterSpec",
        "submitterPodTemplate": "pod",
        "metadata": "strings",
        "clusterSelector": "strings",
        "submitterConfig": "object",
        "managedBy": "string",
        "deletionStrategy": "object",
        "entrypoint": "string",
        "runtimeEnvYAML": "string",
        "jobId": "string",
        "submissionMode": "K8sJobMode|HTTPMode|InteractiveMode|SidecarMode",
        "entrypointResources": "string",
        "entrypointNumCpus": "number",
        "entrypointNumGpus": "number",
        "ttlSecondsAfterFinished": "integer",
        "shutdownAfterJobFinishes": "boolean",
        "suspend": "boolean",
    },
    "RayClusterSpec": {
        "suspend": "boolean",
        "managedBy": "string",
        "autoscalerOptions": "AutoscalerOptions",
        "headServiceAnnotations": "strings",
        "enableInTreeAutoscaling": "boolean",
        "gcsFaultToleranceOptions": "GcsFaultToleranceOptions",
        "headGroupSpec!": "HeadGroupSpec",
        "rayVersion": "string",
        "workerGroupSpecs": "[WorkerGroupSpec]",
    },
    "HeadGroupSpec": {
        "template!": "pod",
        "headService": "object",
        "enableIngress": "boolean",
        "rayStartParams": "strings",
        "serviceType": "string",
    },
    "WorkerGroupSpec": {
        "suspend": "boolean",
        "groupName!": "string",
        "replicas": "integer",
        "minReplicas!": "integer",
        "maxReplicas!": "integer",
        "idleTimeoutSeconds": "integer",
        "rayStartParams": "strings",
        "template!": "pod",
        "scaleStrategy": "object",
        "numOfHosts": "integer",
    },
    "AutoscalerOptions": {
        "resources": "object",
        "image": "string",
        "imagePullPolicy": "string",
        "securityContext": "object",
        "idleTimeoutSeconds": "integer",
        "upscalingMode": "Default|Aggressive|Conservative",
        "version": "v1|v2",
        "env": "[object]",
        "envFrom": "[object]",
        "volumeMounts": "[object]",
    },
    "GcsFaultToleranceOptions": {
        "redisUsername": "RedisCredential",
        "redisPassword": "RedisCredential",
        "externalStorageNamespace": "string",
        "redisAddress!": "string",
    },
    "RedisCredential": {"valueFrom": "object", "value": "string"},
}
"""The fields of each type; `!`: required."""


def require_valid_ray_job(ray_job: dict[str, Any]) -> None:
    """Fail for a field that KubeRay or Kubernetes does not know, a value of another type, or a missing field."""
    assert ray_job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    jsonschema.Draft202012Validator(_schema("RayJobSpec")).validate(ray_job["spec"])
    cluster = ray_job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def _schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of a type, or of the short form of one."""
    if name.startswith("["):
        return {"type": "array", "items": _schema(name[1:-1])}
    if "|" in name:
        return {"enum": name.split("|")}
    if name == "strings":
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if name not in _TYPES:
        return {"type": "object" if name == "pod" else name}
    fields = {field.removesuffix("!"): _schema(kind) for field, kind in _TYPES[name].items()}
    required = [field[:-1] for field in _TYPES[name] if field.endswith("!")]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
