import json
import subprocess
from importlib.metadata import PackageNotFoundError

import torch

from finetune import __version__
from finetune.runtime.environment import (
    default_config,
    environment_facts,
    git_state,
    launcher_variables,
    package_versions,
)

CANARY = "canary-3f9c"


def git(folder, *words):
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_environment_facts_are_plain_json_with_the_versions():
    facts = json.loads(json.dumps(environment_facts()))
    assert facts["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["packages"]["finetune"] == __version__
    assert facts["num_cpus"] >= 1 and facts["memory_bytes"] > 10**8
    assert facts["devices"][0]["type"] in ("cpu", "cuda")


def test_a_package_that_runs_from_its_source_is_named_among_the_versions(monkeypatch):
    def version(package):
        if package != "torch":
            raise PackageNotFoundError(package)
        return "2.11.0"

    monkeypatch.setattr("finetune.runtime.environment.version", version)
    assert package_versions() == {"finetune": __version__, "torch": "2.11.0"}


def test_no_secret_of_the_environment_or_command_line_is_in_the_facts(monkeypatch):
    for name in ("HF_TOKEN", "ACCELERATE_API_KEY", "SLURM_PASSWORD", "MY_OWN_SECRET", "FSDP_CREDENTIALS"):
        monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("HF_ENDPOINT", f"https://me:{CANARY}@hub.example.org")
    monkeypatch.setattr("sys.argv", ["finetune", "--hub-token", CANARY, f"--set=model.password={CANARY}"])
    facts = environment_facts()
    assert CANARY not in json.dumps(facts)
    assert facts["launcher"]["HF_TOKEN"] == "[redacted]"
    assert "MY_OWN_SECRET" not in facts["launcher"]


def test_launcher_variables_are_chosen_by_name():
    variables = {"WORLD_SIZE": "2", "FSDP_VERSION": "2", "ACCELERATE_USE_FSDP": "true", "PATH": "/bin"}
    assert list(launcher_variables(variables)) == ["ACCELERATE_USE_FSDP", "FSDP_VERSION", "WORLD_SIZE"]


def test_accelerates_hidden_default_config_is_found(tmp_path):
    (tmp_path / "accelerate").mkdir()
    path = tmp_path / "accelerate" / "default_config.yaml"
    assert default_config({"HF_HOME": str(tmp_path)}) == {"path": str(path), "exists": False}
    path.write_text("distributed_type: NO\n")
    assert default_config({"HF_HOME": str(tmp_path)}) == {"path": str(path), "exists": True}


def test_git_state_has_commit_changes_and_a_redacted_remote(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-m", "one")
    clean = git_state(tmp_path)
    assert len(clean["commit"]) == 40 and clean["is_dirty"] is False and clean["remote"] is None
    (tmp_path / "a.txt").write_text("two\n")
    git(tmp_path, "remote", "add", "origin", f"https://me:{CANARY}@host/repo.git")
    changed = git_state(tmp_path)
    assert changed["is_dirty"] is True and changed["commit"] == clean["commit"]
    assert CANARY not in changed["remote"]


def test_git_state_is_none_outside_a_repository_and_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None
