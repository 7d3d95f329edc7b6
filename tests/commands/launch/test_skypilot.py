"""Tasks of every strategy: SkyPilot's own parser, in an interpreter of its own, and shellcheck."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from finetune.commands.launch.job_files import Destination, JobFileArguments
from finetune.commands.launch.skypilot import SkypilotArguments, launch_skypilot
from finetune.errors import UserError
from tests.commands.launch.conftest import CONFIGS, fits
from tests.launch.checkers import shellcheck
from tests.launch.hostile import HIDDEN, HOSTILE, NAMES
from tests.refusals import refused

PYTHON = os.environ.get("FINETUNE_TEST_SKYPILOT_PYTHON")
"""An interpreter with SkyPilot, which needs another version of click than huggingface_hub; `.ci/run` makes one."""

PARSE = """
import json, sys
import sky
from sky.utils import yaml_utils

found = []
for path in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml_utils.read_yaml(path))
    (resources,) = task.resources
    found.append(
        {
            "run": task.run,
            "setup": task.setup,
            "envs": task.envs,
            "nodes": task.num_nodes,
            "accelerators": resources.accelerators,
            "spot": resources.use_spot,
            "recovery": resources.job_recovery,
            "buckets": {path: store.source for path, store in task.storage_mounts.items()},
        }
    )
print(json.dumps(found))
"""


def task(words: JobFileArguments, file: Path = Path("task.out.yaml"), **sky: Any) -> dict[str, Any]:
    at_url = replace(words, override=(*words.override, "run.folder=s3://bucket/run"))
    if words.nodes > 1:
        at_url = replace(at_url, override=(*at_url.override, "run.local_folder=/shared/run"))
    chosen = SkypilotArguments(**{"gpu": "H100", "volume": ("/shared=runs",), **sky})
    assert launch_skypilot(at_url, chosen, Destination(output=file)) == 0
    return dict(YAML(typ="safe").load(file.read_bytes()))


def parse(files: list[Path]) -> list[dict[str, Any]]:
    """Return what SkyPilot reads in each file."""
    ran = subprocess.run([str(PYTHON), "-c", PARSE, *map(str, files)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.full
@pytest.mark.skipif(PYTHON is None, reason="set FINETUNE_TEST_SKYPILOT_PYTHON to an interpreter with skypilot")
def test_skypilots_parser_reads_the_written_file(words, tmp_path):
    variants: dict[Path, dict[str, Any]] = {}
    for number, strategy in enumerate(name for name in CONFIGS if fits(name, nodes=2, gpus_per_node=2)):
        file = tmp_path / f"{number}.yaml"
        sky = {"bucket": ("/data=s3://some-bucket",), "infra": "aws", "strategy": "FAILOVER"} if number % 2 else {}
        variants[file] = task(words(strategy, env=("X=yes",)), file, **sky)
    for number, hostile in enumerate(word for word in HOSTILE if word not in HIDDEN):
        file = tmp_path / f"hostile-{number}.yaml"
        variants[file] = task(words("ddp", env=(f"HOSTILE={hostile}",)), file, setup=f"echo start\n{hostile}")
    for file, read in zip(variants, parse(list(variants)), strict=True):
        written = variants[file]
        assert {name: read[name] for name in ("run", "setup", "envs")} == {
            name: written[name] for name in ("run", "setup", "envs")
        }
        assert (read["nodes"], read["accelerators"], read["spot"]) == (2, {"H100": 2}, True)
        assert read["recovery"]["recover_on_exit_codes"] == [75]
        assert read["buckets"] == {path: each["source"] for path, each in written.get("file_mounts", {}).items()}
    assert len(variants) > 50


def test_every_strategy_gives_a_script_that_shellcheck_takes_or_is_refused(words):
    scripts = set()
    for strategy in CONFIGS:
        for nodes in (1, 2):
            gpus = 1 if strategy == "single" and nodes == 1 else 2
            wanted = words(strategy, nodes=nodes, gpus_per_node=gpus)
            if fits(strategy, nodes=nodes, gpus_per_node=gpus):
                scripts.add(task(wanted)["run"])
            else:
                with refused(UserError, "accelerate_configs"):
                    task(wanted)
    assert len(scripts) >= 15
    for script in (sorted(scripts)[0], sorted(scripts)[-1]):
        assert shellcheck(f"#!/bin/bash\n{script}", shell="bash") == ""


@pytest.mark.full
def test_shellcheck_finds_nothing_in_any_script(words):
    names = [name for name in CONFIGS if fits(name, nodes=2, gpus_per_node=2)]
    scripts = [f"#!/bin/bash\n{task(words(name))['run']}" for name in names]
    assert len(scripts) >= 11 and [found for each in scripts if (found := shellcheck(each, shell="bash"))] == []


@pytest.mark.parametrize("hostile", NAMES)
def test_hostile_names_and_values_are_quoted_or_refused(words, project, hostile):
    job = project / f"{hostile}.yaml"
    job.write_text((project / "job.yaml").read_text())
    wanted = replace(words("ddp", env=(f"HOSTILE={hostile}",)), config=job)
    if hostile in HIDDEN:
        with refused(UserError):
            task(wanted)
        return
    found = task(wanted)
    assert found["envs"]["HOSTILE"] == hostile
    assert shellcheck(f"#!/bin/bash\n{found['run']}", shell="bash") == ""


def test_the_job_is_found_in_the_folder_that_is_copied(words, project):
    found = task(words("ddp"))
    assert found["workdir"] == str(project)
    assert "--config ./job.yaml" in found["run"] and f"{project}" not in found["run"]
    assert "--config_file accelerate_configs/ddp.yaml" in found["run"]


@pytest.mark.parametrize(
    ("override", "sky", "message"),
    [
        ((), {"gpu": None}, "--gpu"),
        ((), {"bucket": ("/data",)}, "--bucket /data"),
        ((), {"bucket": ("data=s3://bucket",)}, "--bucket"),
        ((), {"bucket": ("/d=s3://a", "/d=s3://b")}, "--bucket"),
        ((), {"volume": ("/shared=a b",)}, "--volume"),
        ((), {"volume": ()}, "run.local_folder"),
        (("model.name=/models/llama", "model.from_config=null", "model.tokenizer=null"), {}, "model.name"),
    ],
)
def test_mistakes_are_named(words, override, sky, message):
    with refused(UserError, message):
        task(words("ddp", override=override), **sky)


def test_a_job_elsewhere_is_refused(words, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "job.yaml"
    wanted = words("ddp")
    other.write_text(wanted.config.read_text().replace("rows.jsonl", str(wanted.config.with_name("rows.jsonl"))))
    with refused(UserError, "SkyPilot"):
        task(replace(wanted, config=other))
