"""JobSets of every strategy: the models of Kubeflow, the schemas of Kubernetes, and shellcheck."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from ruamel.yaml import YAML

from finetune.commands.launch.job_files import JobFileArguments
from finetune.commands.launch.kubernetes import KubernetesArguments, launch_kubernetes
from finetune.errors import UserError
from tests.commands.launch.conftest import CONFIGS, fits
from tests.launch.checkers import shellcheck
from tests.launch.expansion import as_kubernetes_expands
from tests.launch.hostile import HIDDEN, NAMES
from tests.refusals import refused

KUBERNETES = "1.34"
MORE = {
    "namespace": "team-a",
    "claim": ("data:/data", "more.data:/more data"),
    "resource": ("cpu=16", "memory=200Gi", "rdma/hca=1"),
    "node_selector": ("cloud.google.com/gke-accelerator=nvidia-h100",),
    "service_account": "trainer",
}


def objects(words: JobFileArguments, **kubernetes: Any) -> list[dict[str, Any]]:
    """Return the objects of the file, each checked."""
    file = Path("job.yaml.out")
    there = {"in_image": (Path.cwd(),), "claim": ("data:/data",), **kubernetes}
    at_data = replace(words, override=(*words.override, "run.folder=/data/run"), output=file)
    assert launch_kubernetes(at_data, KubernetesArguments("registry/image:1", **there)) == 0
    found = list(YAML(typ="safe").load_all(file.read_bytes()))
    for each in found:
        require_valid(each)
    return found


def require_valid(each: dict[str, Any]) -> None:
    """Fail for a field that the schemas do not know, or a value that they do not take."""
    if each["kind"] == "ConfigMap":
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
        return
    assert models.JobsetV1alpha2JobSet.from_dict(each).to_dict() == each  # what it does not know, it drops
    for job in each["spec"]["replicatedJobs"]:
        metadata = {"name": each["metadata"]["name"]}
        batch = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(batch, KUBERNETES, strict=True)


def pod_of(job_set: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


def script_of(found: list[dict[str, Any]]) -> str:
    run = pod_of(found[-1])["containers"][0]
    assert run["command"][:2] == ["/bin/sh", "-c"]
    variables = {each["name"]: each["value"] for each in run["env"]}
    return as_kubernetes_expands(run["command"][2], variables)


def test_every_strategy_gives_valid_objects_or_is_refused(words):
    scripts = set()
    for strategy in CONFIGS:
        for nodes in (1, 2):
            gpus = 1 if strategy == "single" and nodes == 1 else 2
            wanted = words(strategy, nodes=nodes, gpus_per_node=gpus)
            if not fits(strategy, nodes=nodes, gpus_per_node=gpus):
                with refused(UserError, "accelerate_configs"):
                    objects(wanted)
                continue
            scripts.add(script_of(objects(wanted, **(MORE if nodes == 2 else {}))))
    assert len(scripts) >= 15
    for script in (sorted(scripts)[0], sorted(scripts)[-1]):
        assert shellcheck(script, shell="sh") == ""


@pytest.mark.full
def test_shellcheck_finds_nothing_in_any_script(words):
    names = [name for name in CONFIGS if fits(name, nodes=2, gpus_per_node=2)]
    scripts = [script_of(objects(words(name))) for name in names]
    assert len(scripts) >= 11 and [found for each in scripts if (found := shellcheck(each, shell="sh"))] == []


def test_a_job_set_starts_again_as_a_whole_unless_the_run_is_over(words):
    job_set = objects(words("fsdp2", stop=300, max_restarts=5))[-1]
    policy, job = job_set["spec"]["failurePolicy"], job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert policy["maxRestarts"] == 99 and policy["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert job["backoffLimit"] == 0 and job["completionMode"] == "Indexed" and job["completions"] == 2
    disrupted, over = job["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Count" and over["action"] == "FailJob"
    assert 2 in over["onExitCodes"]["values"] and 75 not in over["onExitCodes"]["values"]
    pod = pod_of(job_set)
    variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300 < pod["terminationGracePeriodSeconds"]
    assert "--max-restarts 5" in script_of([job_set])


def test_ranks_meet_at_the_first_pod(words):
    job_set = objects(words("ddp"))[-1]
    network, script = job_set["spec"]["network"], script_of([job_set])
    assert network["enableDNSHostnames"] and "MASTER_ADDR=run-node-0-0.run\n" in script
    assert network["subdomain"] == "run" and 'MACHINE_RANK="$JOB_COMPLETION_INDEX"' in script


def test_the_pod_mounts_the_files_of_the_job_at_their_local_paths(words, project):
    files, job_set = objects(words("multi_node_zero3"))
    (container,) = pod_of(job_set)["containers"]
    mounts = {mount["mountPath"]: mount["subPath"] for mount in container["volumeMounts"] if "subPath" in mount}
    assert mounts == {
        f"{project}/job.yaml": "job.yaml",
        f"{project}/accelerate_configs/multi_node_zero3.yaml": "accelerate.yaml",
        f"{project}/ds_configs/zero3.json": "deepspeed.json",
    }
    for path, name in mounts.items():
        assert files["data"][name] == Path(path).read_text()
    assert f"--deepspeed_config_file {project}/ds_configs/zero3.json" in script_of([job_set])


@pytest.mark.parametrize("hostile", NAMES)
def test_hostile_values_arrive_unchanged_or_are_refused(words, project, hostile):
    job = project / f"{hostile}.yaml"
    job.write_text((project / "job.yaml").read_text())
    wanted = replace(words("ddp", env=(f"HOSTILE={hostile}",)), config=job)
    if hostile in HIDDEN:
        with refused(UserError):
            objects(wanted)
        return
    found = objects(wanted)
    assert shellcheck(script_of(found), shell="sh") == ""
    run = pod_of(found[-1])["containers"][0]
    values = {each["name"]: as_kubernetes_expands(each["value"], {"HOME": "/root"}) for each in run["env"]}
    assert values["HOSTILE"] == hostile and str(job) in {mount["mountPath"] for mount in run["volumeMounts"]}


@pytest.mark.parametrize(
    ("kubernetes", "message"),
    [
        ({"in_image": ()}, "data.train.path"),
        ({"claim": ("data",)}, "--claim data"),
        ({"claim": ("data:relative",)}, "--claim data:relative"),
        ({"secret": ("API_KEY=wandb",)}, "--secret API_KEY"),
        ({"node_selector": ("x",)}, "--node-selector"),
    ],
)
def test_mistakes_are_named(words, kubernetes, message):
    with refused(UserError, message):
        objects(words("ddp"), **kubernetes)


def test_a_run_that_is_lost_with_its_pod_is_refused(words, project):
    def launch(*override: str, nodes: int = 2) -> int:
        kubernetes = KubernetesArguments("image", claim=("data:/data",), in_image=(project,))
        return launch_kubernetes(words("ddp", nodes=nodes, override=override, output=Path("out.yaml")), kubernetes)

    with refused(UserError, "run.folder"):
        launch()
    with refused(UserError, "run.local_folder"):
        launch("run.folder=s3://bucket/run")
    assert launch("run.folder=s3://bucket/run", nodes=1) == 0
    assert launch("run.folder=s3://bucket/run", "run.local_folder=/data/stage") == 0
