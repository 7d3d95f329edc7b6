"""RayJobs of every strategy, by the schema of KubeRay; their entrypoint and the hook that lets ranks save."""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from finetune.commands.launch.job_files import Destination, JobFileArguments
from finetune.commands.launch.kubernetes import KubernetesArguments, launch_kubernetes
from finetune.commands.launch.ray_submit import STOP_WAIT, read_redis
from finetune.errors import UserError
from tests.commands.launch.conftest import CONFIGS, fits
from tests.commands.launch.kuberay_schema import require_valid_ray_job
from tests.launch.hostile import HIDDEN, NAMES
from tests.refusals import refused


def ray_job(words: JobFileArguments, **kubernetes: Any) -> dict[str, Any]:
    """Return the RayJob of the file, checked."""
    file = Path("job.yaml.out")
    options = {"ray": True, "in_image": (Path.cwd(),), "claim": ("data:/data",), **kubernetes}
    at_data = replace(words, override=(*words.override, "run.folder=/data/run"))
    assert launch_kubernetes(at_data, KubernetesArguments("registry/image:1", **options), Destination(output=file)) == 0
    config_map, found = YAML(typ="safe").load_all(file.read_bytes())
    assert config_map["kind"] == "ConfigMap" and "job.yaml" in config_map["data"]
    require_valid_ray_job(found)
    return dict(found)


def test_the_schema_rejects_other_fields_and_types(words):
    good = ray_job(words("ddp"), min_nodes=1, redis="redis:6379", redis_secret="redis:password")
    cluster = good["spec"]["rayClusterSpec"]
    pod = cluster["headGroupSpec"]["template"]["spec"]
    for place, name, value in (
        (good["spec"], "ttlSeconds", 1),
        (cluster, "gcsFaultTolerance", {}),
        (cluster["workerGroupSpecs"][0], "maxReplicas", "2"),
        (pod, "gracePeriod", 1),
    ):
        before = dict(place)
        place[name] = value
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            require_valid_ray_job(good)
        place.clear()
        place.update(before)
    require_valid_ray_job(good)


def test_every_strategy_gives_a_valid_ray_job_or_is_refused(words):
    num_valid = 0
    for strategy in CONFIGS:
        wanted = words(strategy, nodes=2, gpus_per_node=2)
        if fits(strategy, nodes=2, gpus_per_node=2) and strategy != "multi_node_hsdp":  # whose file names 16 ranks
            ray_job(wanted)
            num_valid += 1
        else:
            with refused(UserError, "accelerate_configs"):
                ray_job(wanted, min_nodes=2)
    assert num_valid >= 9


def test_workers_come_and_go_between_the_numbers_of_hosts(words, project):
    job = ray_job(words("fsdp2", nodes=4, gpus_per_node=2, stop=300), min_nodes=1, resource=("cpu=16",))
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 4)
    assert cluster["enableInTreeAutoscaling"] is True and spec["shutdownAfterJobFinishes"] is True
    assert shlex.split(spec["entrypoint"]) == [
        *("python", "-m", "finetune", "launch", "ray", "--config", f"{project}/job.yaml"),
        *("--accelerate", f"{project}/accelerate_configs/fsdp2.yaml", "--nodes", "1:4", "--gpus-per-node", "2"),
        *("--set", "run.folder=/data/run", "--stop", "300", "--max-failures", "3"),
    ]
    assert int(YAML(typ="safe").load(spec["runtimeEnvYAML"])["env_vars"][STOP_WAIT]) > 300
    worker, head = group["template"]["spec"], cluster["headGroupSpec"]["template"]["spec"]
    assert worker["terminationGracePeriodSeconds"] > 300
    limits = worker["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "16", "nvidia.com/gpu": "2"} and group["rayStartParams"] == {"num-gpus": "2"}
    assert "nvidia.com/gpu" not in str(head["containers"][0]["resources"])
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"  # no rank on the head
    for pod in (head, worker):
        paths = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert {"/data", f"{project}/job.yaml", f"{project}/accelerate_configs/fsdp2.yaml"} <= paths


def test_a_fixed_number_of_hosts_needs_no_autoscaler(words):
    cluster = ray_job(words("ddp", cpu=True))["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 2) and "enableInTreeAutoscaling" not in cluster
    assert group["rayStartParams"] == {"num-cpus": "2"} and "gcsFaultToleranceOptions" not in cluster


def test_the_state_of_the_head_is_kept_in_the_redis_that_is_named(words):
    cluster = ray_job(words("ddp"), redis="redis:6379", redis_secret="redis-auth:password")["spec"]["rayClusterSpec"]
    assert cluster["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis-auth", "key": "password"}}},
    }
    for address, secret in (("redis", None), ("a b:1", None), (None, "redis-auth:password"), ("redis:1", "password")):
        with refused(UserError, "--redis"):
            read_redis(address, secret)
    with refused(UserError, "--redis and --redis-secret", "RayJob"):
        ray_job(words("ddp"), ray=False, redis="redis:6379")
    with refused(UserError, "--kind trainjob: --ray prints", "RayJob"):
        ray_job(words("ddp"), kind="trainjob")


@pytest.mark.parametrize("hostile", NAMES)
def test_a_hostile_path_arrives_unchanged_or_is_refused(words, project, hostile):
    if hostile in HIDDEN or not hostile.isprintable() or ":" in hostile:
        return  # refused for every kind, see test_kubernetes
    job = project / f"{hostile}.yaml"
    job.write_text((project / "job.yaml").read_text())
    entrypoint = ray_job(replace(words("ddp"), config=job))["spec"]["entrypoint"]
    shown = subprocess.run(
        ["/bin/sh", "-c", f"printf '%s\\n' {entrypoint}"], capture_output=True, text=True, check=True
    )
    assert str(job) in shown.stdout.splitlines()


@pytest.mark.full
def test_ranks_save_before_their_pod_is_ended(words, tmp_path):
    """The hook is shown two processes only: on this machine it would end the ranks of other tests."""
    (group,) = ray_job(words("ddp", stop=60))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    program, option, code = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, option) == ("python", "-c")
    mark = tmp_path / "saved"
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import pathlib, signal, sys, time\n"
        f"def save(*_):\n    time.sleep(1)\n    pathlib.Path({str(mark)!r}).touch()\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "print('ready', flush=True)\ntime.sleep(600)\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, str(rank), *marks], stdout=subprocess.PIPE)
        for marks in (["finetune", "train"], ["other"])
    ]
    try:
        for each in ranks:
            assert each.stdout is not None and each.stdout.readline() == b"ready\n"
        pids = [each.pid for each in ranks]
        only_these = (
            "import psutil, subprocess\nsubprocess.run = print\n"
            "def describe(process, names):\n    process.info = process.as_dict(names)\n    return process\n"
            f"psutil.process_iter = lambda names: [describe(psutil.Process(pid), names) for pid in {pids}]\n"
        )
        hook = [sys.executable, "-c", only_these + code]
        shown = subprocess.run(hook, check=True, timeout=120, capture_output=True, text=True, env={"PATH": ""})
        assert shown.stdout == "['ray', 'stop', '--force']\n"  # printed, not run
        assert mark.exists() and ranks[1].poll() is None
    finally:
        for each in ranks:
            each.kill()
            each.wait()
