"""`finetune launch kubernetes`: a JobSet, with the job's files in a ConfigMap."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.commands.launch.job_files import (
    JobFileArguments,
    check_job,
    check_options,
    check_text,
    deliver,
    read_pairs,
    require_files,
    require_kept,
)
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.config.load import LoadedConfig, read_text_file
from finetune.errors import UserError
from finetune.launch.jobs import PORT, host_script, render
from finetune.runtime.text.redact import redacted_yaml

_FINAL_CODES = [1, 2, 126, 127, 130]
"""Exit codes without a restart: `finetune launch next` decided so, or the program does not exist."""

_DECIDING_SECONDS = 30
"""Time after the save for the decision whether to restart."""

_RESOURCE = r"([A-Za-z0-9.-]+/)?[A-Za-z0-9._-]+"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_MAX_FILE_BYTES = 200_000
"""Of the files together: a ConfigMap holds 1 MiB, and `kubectl apply` stores it in an annotation of 256 KiB."""

_SECRETS = (
    "Create it with `kubectl create secret generic NAME --from-literal=KEY=...`, and write --secret NAME for variables "
    "of all its keys, or --secret VARIABLE=NAME:KEY for one (`secretKeyRef`)."
)
_MOUNT = "Mount a volume with --claim CLAIM:/PATH, or name a folder of the image with --in-image"


@dataclass(frozen=True)
class KubernetesArguments:
    """The options of Kubernetes, as they are typed."""

    image: str
    namespace: str | None = None
    claim: tuple[str, ...] = ()  # CLAIM:/PATH
    in_image: tuple[Path, ...] = ()
    secret: tuple[str, ...] = ()
    resource: tuple[str, ...] = ()  # NAME=AMOUNT
    gpu_resource: str = "nvidia.com/gpu"
    node_selector: tuple[str, ...] = ()  # LABEL=VALUE
    service_account: str | None = None
    max_starts: int = 100  # for any reason, preemptions included


@dataclass(frozen=True)
class File:
    """A file of the job, which is mounted in the container at the same path as here."""

    name: str  # in the ConfigMap
    path: str
    content: str


def launch_kubernetes(arguments: JobFileArguments, kubernetes: KubernetesArguments) -> int:
    """Print, write or submit the objects, and return the exit code. Raises UserError, and ConfigError for the job."""
    check_options((arguments, kubernetes), advice=_SECRETS)
    claims = _read_claims(kubernetes.claim)
    volumes = tuple(map(Path, claims))
    folders = (*volumes, *kubernetes.in_image)
    request, loaded = check_job(replace(arguments, elsewhere=folders))
    require_kept(request, volumes, advice="Mount a volume that all pods can write: --claim CLAIM:/PATH")
    require_files(loaded, folders, advice=_MOUNT)
    files = _job_files(arguments, loaded)
    for file in files:
        check_text(file.content, source=file.path, advice=_SECRETS, redact=redacted_yaml)
    typed = [text for text in kubernetes.secret if "=" in text]
    secret_keys = {}
    for variable, secret in read_pairs(typed, option="--secret", noun="variable", name=_VARIABLE).items():
        name, _, key = secret.partition(":")
        if not name or not key:
            raise UserError(f"--secret {variable}: write VARIABLE=NAME:KEY, a secret and one of its keys.")
        secret_keys[variable] = name, key
    resources = read_pairs(kubernetes.resource, option="--resource", noun="resource", name=_RESOURCE)
    if request.uses_gpus:
        resources[kubernetes.gpu_resource] = str(request.ranks_per_node)
    deepspeed = next((file.path for file in files if file.name == "deepspeed.json"), None)
    address = f"{request.name}-node-0-0.{request.name}"
    first_pod = {"MACHINE_RANK": '"$JOB_COMPLETION_INDEX"', "MASTER_ADDR": address, "MASTER_PORT": str(PORT)}
    text = render(
        "kubernetes.yaml.jinja",
        name=request.name,
        options=kubernetes,
        files=files,
        num_nodes=request.num_nodes,
        final_codes=_FINAL_CODES,
        grace_seconds=request.stop_seconds + _DECIDING_SECONDS,
        node_selector=read_pairs(kubernetes.node_selector, option="--node-selector", noun="label", name=_RESOURCE),
        claims=claims,
        script=host_script(replace(request, deepspeed_file=deepspeed), first_pod),
        variables=request.variables(),
        secrets=[name for name in kubernetes.secret if "=" not in name],
        secret_keys=secret_keys,
        resources=resources,
    )
    command = ("kubectl", "apply", "-f")
    return deliver(text, arguments, file=f"{request.name}.yaml", command=command, advice=_SECRETS)


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
    return tuple(files)


def _read_claims(texts: Sequence[str]) -> dict[str, str]:
    """Return the persistent volume claim of each path; raises UserError."""
    claims: dict[str, str] = {}
    for text in texts:
        claim, mark, path = text.partition(":")
        if not mark or not claim or not path.startswith("/"):
            raise UserError(f"--claim {text}: write CLAIM:/PATH, a persistent volume claim and its mount path.")
        if path in claims or path == "/dev/shm":
            raise UserError(f"--claim {text}: {path} is already a mount path.")
        claims[path] = claim
    return claims
