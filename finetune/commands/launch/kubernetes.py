"""`finetune launch kubernetes`: a JobSet or a TrainJob, with the job's files in a ConfigMap."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.contents import INSIST, check_options, check_text
from finetune.commands.launch.job_files import (
    Destination,
    JobFileArguments,
    check_job,
    deliver,
    read_pairs,
    require_files,
    require_kept,
)
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.config.load import LoadedConfig, read_text
from finetune.errors import UserError
from finetune.launch.jobs.kubernetes import JOBSET, TRAINJOB, File, KubernetesOptions, kubernetes_objects
from finetune.launch.jobs.yaml_text import yaml_text
from finetune.runtime.text.redact import redacted_yaml

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = rf"{_LABEL}(\.{_LABEL})*"
_RESOURCE = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+"
_AMOUNT = re.compile(r"\d+(\.\d+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
_MAX_FILE_BYTES = 200_000
"""Of the files together: a ConfigMap holds 1 MiB, and `kubectl apply` notes all of it in 256 KiB."""

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
    """The options that are those of Kubernetes alone."""

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
    runtime: str | None = None
    max_starts: int = 100


def launch_kubernetes(words: JobFileArguments, kubernetes: KubernetesArguments, destination: Destination) -> int:
    """Print, write or submit the objects, and return the exit code. Raises UserError, and ConfigError for the job."""
    destination = replace(destination, command=("kubectl", "apply", "-f"), advice=f"{_SECRETS} {INSIST}")
    check_options((words, kubernetes), advice=destination.advice, allows_secrets=destination.allow_secrets)
    claims = _read_claims(kubernetes.claim)
    there = (*map(Path, claims), *kubernetes.in_image)
    request, loaded = check_job(replace(words, elsewhere=there))
    require_kept(
        request, tuple(map(Path, claims)), advice="Mount a volume that all pods can write: --claim CLAIM:/PATH"
    )
    require_files(loaded, there, advice=_MOUNT)
    _require_names(kubernetes)
    files = _job_files(words, loaded)
    for file in files:
        check_text(
            file.content,
            what=file.path,
            advice=destination.advice,
            allows_secrets=destination.allow_secrets,
            redact=redacted_yaml,
        )
    deepspeed = next((file.path for file in files if file.name == "deepspeed.json"), None)
    options = KubernetesOptions(
        kind=kubernetes.kind,
        image=kubernetes.image,
        files=files,
        namespace=kubernetes.namespace,
        claims=claims,
        secrets=tuple(name for name in kubernetes.secret if "=" not in name),
        secret_keys=_read_secret_keys(kubernetes.secret),
        resources=_read_resources(kubernetes.resource),
        gpu_resource=kubernetes.gpu_resource,
        node_selector=read_pairs(kubernetes.node_selector, option="--node-selector", what="label", name=_RESOURCE),
        service_account=kubernetes.service_account,
        runtime=kubernetes.runtime,
        max_starts=kubernetes.max_starts,
    )
    text = yaml_text(kubernetes_objects(replace(request, deepspeed_file=deepspeed), options), comment=_COMMENT)
    return deliver(text, destination, name=request.name)


def _job_files(words: JobFileArguments, loaded: LoadedConfig) -> tuple[File, ...]:
    """Return the job, the accelerate file and what that names; raises UserError for files that do not fit."""
    values = read_accelerate_file(words.accelerate).values
    named = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    try:
        files = [
            File("job.yaml", str(words.config.absolute()), loaded.text),
            File("accelerate.yaml", str(words.accelerate.absolute()), read_text(words.accelerate)),
        ]
        if named is not None:
            files.append(File("deepspeed.json", str(Path(named).absolute()), read_text(Path(named))))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--accelerate {words.accelerate}: {named or 'the file'} cannot be read: {error}.") from error
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
            raise UserError(f"--claim {text}: write CLAIM:/PATH, a persistent volume claim and where it is mounted.")
        _require_path(path, option=f"--claim {text}")
        if path in claims or path == "/dev/shm":
            raise UserError(f"--claim {text}: something else is mounted at {path} already.")
        claims[path] = claim
    return claims


def _require_path(path: str, *, option: str) -> None:
    if not path.startswith("/") or path == "/" or ":" in path or not path.isprintable() or ".." in Path(path).parts:
        raise UserError(f"{option}: {path!r} cannot be a place in a container. Write an absolute path without `:`.")


def _read_secret_keys(texts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the secret and its key for each variable; raises UserError."""
    pairs = [text for text in texts if "=" in text]
    secrets = read_pairs(pairs, option="--secret", what="variable", name=r"[A-Za-z_][A-Za-z0-9_]*")
    keys = {}
    for variable, value in secrets.items():
        name, _, key = value.partition(":")
        if not re.fullmatch(_NAME, name) or not re.fullmatch(r"[A-Za-z0-9._-]+", key):
            raise UserError(f"--secret {variable}: write VARIABLE=NAME:KEY, a secret and one of its keys.")
        keys[variable] = name, key
    return keys


def _read_resources(texts: Sequence[str]) -> dict[str, str]:
    amounts = read_pairs(texts, option="--resource", what="resource", name=_RESOURCE)
    for name, amount in amounts.items():
        if not _AMOUNT.fullmatch(amount):
            raise UserError(f"--resource {name}={amount}: write an amount, such as cpu=16, memory=200Gi or rdma/hca=1.")
    return amounts


def _require_names(words: KubernetesArguments) -> None:
    """Raise UserError for what Kubernetes would refuse, or would take for something else."""
    if words.kind not in (JOBSET, TRAINJOB):
        raise UserError(f"--kind {words.kind}: write {JOBSET} or {TRAINJOB}.")
    if not words.image or not words.image.isprintable() or " " in words.image:
        raise UserError(f"--image {words.image!r}: write the name of an image, such as registry/finetune:cuda.")
    names = {"--namespace": words.namespace, "--service-account": words.service_account, "--runtime": words.runtime}
    for option, name in [*names.items(), *(("--secret", secret) for secret in words.secret if "=" not in secret)]:
        if name is not None and not re.fullmatch(_NAME, name):
            raise UserError(f"{option} {name}: write a name of Kubernetes: small letters, digits, `-` and `.`.")
    if not re.fullmatch(_RESOURCE, words.gpu_resource):
        raise UserError(f"--gpu-resource {words.gpu_resource}: write a resource, such as nvidia.com/gpu.")
    if words.runtime is not None and words.kind != TRAINJOB:
        raise UserError("--runtime: a JobSet has none. Write --kind trainjob, or leave it out.")
    if words.runtime is not None and not all("=" in secret for secret in words.secret):
        raise UserError("--secret: the cluster's runtime takes single variables alone. Write VARIABLE=NAME:KEY.")
