"""The wheels that a bare GPU machine lacks, collected where there is a network."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

NEEDED_FOR = {
    "pydantic": "every case",
    "pydantic_core": "every case",
    "annotated-types": "every case",
    "typing-inspection": "every case",
    "ruamel.yaml": "every case",
    "liger_kernel": "fused layers",
    "deepspeed": "ZeRO",
    "hjson": "ZeRO",
    "trl": "TRL",
    "datasets": "TRL",
    "dill": "TRL",
    "multiprocess": "TRL",
    "torchao": "tests of fp8",
    "schedulefree": "tests of its optimizers",
    "flash_attn": "rows on flash",
    "bitsandbytes": "tests of QLoRA",
}
"""By package, the most important first. The machine has torch, transformers, accelerate, peft and what they need."""
_FROM_SOURCE = ("deepspeed",)  # without compiled operators, which it builds there on first use
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def collect(folder: Path, *, python: str, limit_mib: float) -> None:
    """Fill the folder with wheels for Linux on x86-64, of the versions installed here, and print a line for each.

    A package without a wheel, or one that makes the folder larger than the limit, is left out by name. Raises
    SystemExit if that is one that every case needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, purpose in NEEDED_FOR.items():
        before = set(folder.glob("*.whl"))
        reason = _collect(name, folder, python=python)
        added = set(folder.glob("*.whl")) - before
        if reason is None and _mib(folder) > limit_mib:
            reason = f"the folder would have {_mib(folder):.0f} MiB"
            for path in added:
                path.unlink()
        print(f"{name} ({purpose}): {reason or ', '.join(sorted(path.name for path in added)) or 'collected before'}")
        if reason is not None and purpose == "every case":
            sys.exit(f"{name} is needed for every case.")
    print(f"{len(list(folder.glob('*.whl')))} wheels, {_mib(folder):.1f} MiB, in {folder}")


def _collect(name: str, folder: Path, *, python: str) -> str | None:
    """Download or build the wheel; return why there is none, None if there is one."""
    requirement = f"{name}=={version}" if (version := _installed_version(name)) else name
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if name in _FROM_SOURCE:
        words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    else:
        platforms = (word for platform in _PLATFORMS for word in ("--platform", platform))
        words = ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        words += [*platforms, "--dest", str(folder)]
    done = subprocess.run(
        [*pip, *words, requirement], capture_output=True, text=True, env={**os.environ, "DS_BUILD_OPS": "0"}
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.whl")) / 2**20
