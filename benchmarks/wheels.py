"""Collect the wheels that a bare GPU machine lacks, for a machine without a network: about 8 MB.

    python benchmarks/wheels.py [FOLDER] [--python 3.12] [--skip NAME ...]

The machine has torch, transformers, accelerate, peft and what comes with them. What is downloaded are the versions that
are installed here, for Linux on x86-64; DeepSpeed is built without compiled operators, which it builds there on first
use. There, `pip install --no-index --no-deps --target FOLDER wheels/*.whl` and PYTHONPATH install them.
"""

import argparse
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NAMES = (
    *("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "ruamel.yaml"),  # every run
    *("deepspeed", "hjson"),  # ZeRO
    *("datasets", "dill", "multiprocess", "trl"),  # the comparison with TRL
    "schedulefree",  # tests of its optimizers
)
FROM_SOURCE = ("deepspeed",)
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_BYTES = 64 << 20
"""What travels together to the machines that we know."""


def main() -> int:
    """Download or build the wheels; returns 1 where they are too large to travel."""
    options = _options()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        if name not in options.skip:
            _collect(f"{name}=={metadata.version(name)}", options.folder, python=options.python)
    files = sorted(options.folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files)} wheels, {size / 1e6:.1f} MB, in {options.folder}")
    return int(size > LIMIT_BYTES)


def _collect(requirement: str, folder: Path, *, python: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if requirement.startswith(FROM_SOURCE):
        words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    else:
        platforms = (word for platform in PLATFORMS for word in ("--platform", platform))
        words = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        words += [*platforms, "--dest", str(folder)]
    subprocess.run([*pip, *words, requirement], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("wheels"))
    parser.add_argument("--python", default="3.12", help="version of Python on the machine")
    parser.add_argument("--skip", nargs="*", default=[], choices=NAMES, metavar="NAME", help="what it has already")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
