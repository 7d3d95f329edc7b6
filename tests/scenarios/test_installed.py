"""The built package works where no clone is: from an empty folder, by names, on two processes under ZeRO-2."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.devices import needs

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "finetune", "accelerate_configs", "ds_configs")
FAST = (
    *("train.steps=20", "train.schedule.warmup_steps=2", "checkpoint.every_steps=20", "evaluate.every_steps=20"),
    *("evaluate.generate=null", "export.verify=false"),
)

pytestmark = [pytest.mark.distributed, pytest.mark.full]


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a `sdist` or `wheel` with the backend that pyproject.toml names."""
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    result = subprocess.run(
        [sys.executable, "-c", program, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return into / result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that is built from the sdist that is built from the sources."""
    source, dist, unpacked = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "unpacked"))
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    sdist = build("sdist", source, dist)
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return build("wheel", next(unpacked.iterdir()), dist)


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a clean environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:  # what pip does with a wheel of pure Python, but for the script
        archive.extractall(own)
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")  # without its own .pth files
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *words: str, answers: str = "") -> subprocess.CompletedProcess:
    """Run the interpreter in the folder, without a path to this checkout or what Accelerate has set in this process."""
    foreign = ("PYTHONPATH", "ACCELERATE_", "FSDP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    result = subprocess.run(
        [str(python), *words],
        cwd=folder,
        env=environment,
        input=answers,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
    return result


def test_the_wheel_has_all_files_of_the_package(wheel):
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("finetune/")}
    tracked = subprocess.run(["git", "ls-files", "finetune"], cwd=ROOT, capture_output=True, text=True, check=True)
    links = {"finetune/accelerate_configs", "finetune/ds_configs"}
    expected = set(tracked.stdout.splitlines()) - links
    for link in links:
        expected |= {f"{link}/{path.name}" for path in (ROOT / link).iterdir()}
    assert len(expected) > 450
    assert {name for name in expected if (ROOT / name).exists()} - packaged == set()


def test_the_package_is_known_as_finetune_accelerate(python, tmp_path):
    program = "import finetune, importlib.metadata as m; print(m.version('finetune-accelerate'), finetune.__file__)"
    version, file = run(python, tmp_path, "-c", program).stdout.split()
    assert version == "0.2.0"
    assert ROOT not in Path(file).parents and python.parents[1] in Path(file).parents


@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=needs("zero2"))])
def test_init_check_train_and_chat_work_from_an_empty_folder(python, tmp_path, strategy):
    wrote = run(python, tmp_path, "-m", "finetune", "init", "quickstart", "--strategy", strategy).stdout
    assert f"wrote quickstart/{strategy}.yaml" in wrote
    job = "quickstart/job.yaml"
    checked = run(python, tmp_path, "-m", "finetune", "check", job, "--accelerate", strategy, "--processes", "2").stdout
    assert "job.yaml is ready." in checked
    overrides = [word for each in FAST for word in ("--set", each)]
    words = ("-m", "finetune", "train", "--config", job, "--accelerate", strategy, "--processes", "2", *overrides)
    trained = run(python, tmp_path, *words).stdout
    assert f"{strategy} on 2 processes" in trained and "finished at step 20" in trained
    assert "ds_configs/zero2.json is not in" in trained  # where it was found is logged
    launched = (
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        f"quickstart/{strategy}.yaml",
        "--num_processes",
        "2",
    )
    again = [*overrides, "--set", "run.folder=runs/launched"]
    assert (
        f"{strategy} on 2 processes"
        in run(python, tmp_path, *launched, "-m", "finetune", "--config", job, *again).stdout
    )
    final = "quickstart/runs/quickstart/final"
    answer = run(
        python, tmp_path, "-m", "finetune", "chat", final, answers="Reverse these words: star moon rose\n"
    ).stdout
    assert answer.strip()
