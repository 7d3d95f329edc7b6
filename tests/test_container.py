"""The image definitions: every instruction parses, the linters are content, and both install the same."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".container"
DOCKERFILE, DEFINITION = FOLDER / "Dockerfile", FOLDER / "finetune.def"

INSTRUCTIONS = {
    "FROM",
    "ARG",
    "ENV",
    "SHELL",
    "RUN",
    "COPY",
    "WORKDIR",
    "USER",
    "VOLUME",
    "STOPSIGNAL",
    "ENTRYPOINT",
    "CMD",
}
SECTIONS = {"arguments", "files", "post", "environment", "runscript", "test", "labels", "help"}
SCRIPTS = ("post", "environment", "runscript", "test")
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d[\w.-]*")


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile's instructions: comments left out, continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in joined.splitlines()]


def values(instruction: str) -> list[str]:
    return [words for name, words in instructions() if name == instruction]


def arguments() -> dict[str, str]:
    return dict(words.split("=", 1) for words in values("ARG"))


def header_and_sections() -> tuple[dict[str, str], dict[str, str]]:
    """Return the definition's header and its sections."""
    header, *parts = re.split(r"^%(?=\w)", DEFINITION.read_text(), flags=re.MULTILINE)
    pairs = (line.split(":", 1) for line in header.splitlines() if line.strip() and not line.startswith("#"))
    sections = {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in parts}
    return {key.strip(): value.strip() for key, value in pairs}, sections


def filled_in(text: str) -> str:
    """Return the text with the default of each `{{ argument }}`."""
    _, sections = header_and_sections()
    defaults = dict(line.strip().split("=", 1) for line in sections["arguments"].splitlines() if line.strip())
    return re.sub(r"\{\{ (\w+) \}\}", lambda found: defaults[found[1]], text)


def commands(text: str, name: str) -> Iterator[list[str]]:
    """Return the words of each `name install` in a script, without options."""
    for found in re.finditer(rf"\b{name} install ([^&\n]*)", re.sub(r"\\\n\s*", " ", text)):
        words = re.sub(r"--index-url \S+", "", found[1]).split()
        yield [word for word in words if not word.startswith("-")]


def test_every_instruction_is_one_of_docker_and_every_base_image_is_pinned():
    found = instructions()
    assert {name for name, _ in found} == INSTRUCTIONS
    stages, filled = set(), re.compile(r"\$\{(\w+)\}")
    for words in values("FROM"):
        image, _, stage = filled.sub(lambda each: arguments()[each[1]], words).partition(" AS ")
        assert image in stages or PINNED.fullmatch(image), image
        stages.add(stage)
    assert {"base-cpu", "base-cuda"} <= stages
    assert all(
        isinstance(json.loads(words), list)
        for name in ("SHELL", "ENTRYPOINT", "CMD", "VOLUME")
        for words in values(name)
    )


def test_the_image_runs_as_an_ordinary_user_and_leaves_the_command_to_the_caller():
    assert values("USER")[-1].isdigit() and int(values("USER")[-1]) > 0
    assert values("ENTRYPOINT") == ['["tini", "--"]']
    assert values("STOPSIGNAL") == ["SIGTERM"]
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(values("ENV"))))
    volumes = json.loads(values("VOLUME")[0])
    for name in ("HF_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"):
        assert environment[name].startswith(f"{volumes[0]}/"), name


def test_everything_that_is_copied_exists_and_is_sent_to_the_builder():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copied = {word for words in values("COPY") for word in words.split()[:-1] if not word.startswith("--")}
    assert {"pyproject.toml", "finetune", "accelerate_configs", "ds_configs"} <= copied
    for path in copied | sent:
        assert (ROOT / path).exists(), path
        assert path.split("/")[0] in sent, path
    assert ignored[0] == "*" and any(fnmatch.fnmatch("finetune/__pycache__", line) for line in ignored[1:])


def test_the_installed_torch_is_the_one_of_pyproject():
    asked = re.search(r'"(torch>=[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert asked is not None
    assert f'"{asked[1]}"' in DOCKERFILE.read_text() and f'"{asked[1]}"' in DEFINITION.read_text()


def test_docker_and_apptainer_install_the_same():
    header, sections = header_and_sections()
    script, runs = filled_in(sections["post"]), "\n".join(values("RUN")).replace("$EXTRAS", arguments()["EXTRAS"])
    (apt,), (docker_apt,) = commands(script, "apt-get"), commands(runs, "apt-get")
    assert sorted(apt) == sorted(docker_apt) and "g++" in apt
    pip, docker_pip = list(commands(script, "pip")), list(commands(runs, "pip"))
    assert pip == [words for words in docker_pip if words != ["."]] and len(pip) == 2
    cuda = f"nvidia/cuda:{arguments()['CUDA']}-devel-ubuntu{arguments()['UBUNTU']}"
    assert (header["Bootstrap"], filled_in(header["From"])) == ("docker", cuda)
    indexes = dict(re.findall(r"(base-\w+|TORCH_INDEX)(?:\n|=)(\S+)", DOCKERFILE.read_text()))
    assert f"torch_index={indexes['TORCH_INDEX']}" in sections["arguments"]  # the last: CUDA's


def test_the_apptainer_definition_has_its_sections_and_copies_existing_files():
    _, sections = header_and_sections()
    assert set(sections) == SECTIONS
    pairs = [line.split() for line in sections["files"].splitlines() if line.strip()]
    assert len(pairs) >= 5
    for source, target in pairs:
        assert (ROOT / source).exists() and target == f"/opt/source/{source}"
    assert "finetune doctor" in sections["test"] and sections["runscript"].strip() == 'exec "$@"'


def linter(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def test_hadolint_finds_nothing():
    done = subprocess.run([linter("hadolint"), "--no-color", str(DOCKERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_rule_that_hadolint_is_to_ignore_has_its_reason():
    ignores = re.findall(r"^# hadolint ignore=.*$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    assert ignores and all(re.fullmatch(r"# hadolint ignore=DL\d+ # .{20,}", each) for each in ignores)


@pytest.mark.parametrize("section", SCRIPTS)
def test_shellcheck_finds_nothing(section, tmp_path):
    _, sections = header_and_sections()
    script = tmp_path / f"{section}.sh"
    script.write_text(f"#!/bin/sh\n{filled_in(sections[section])}")
    done = subprocess.run([linter("shellcheck"), str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
