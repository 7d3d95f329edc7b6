"""What DeepSpeed needs to compile its Adam for the CPU, which ZeRO with an offloaded optimizer uses.

It compiles at the first run of a machine, when model and data have been loaded. What is missing is found out before.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

from finetune.runtime.optional import require
from finetune.runtime.upstream import extensions_folder

Which = Callable[[str], str | None]


@dataclass(frozen=True)
class BuildTools:
    """What there is to compile an extension with."""

    has_ninja: bool
    compiler: str | None  # what `CXX` names, or `c++`, where it is found
    nvcc: str | None


def build_tools(variables: Mapping[str, str] = os.environ, *, which: Which = shutil.which) -> BuildTools:
    """Return the tools that torch would compile with."""
    home = cpp_extension.CUDA_HOME
    nvcc = None if home is None else which(str(Path(home, "bin", "nvcc")))
    return BuildTools(which("ninja") is not None, which(variables.get("CXX", "c++")), nvcc)


def missing_for_cpu_adam() -> str | None:
    """Return what DeepSpeed lacks here for its CPU Adam, and the command that installs it; None where it has it.

    Raises MissingPackage without DeepSpeed.
    """
    tools, is_compiled = build_tools(), any(extensions_folder().glob("*/cpu_adam/*.so"))
    if missing_tool(tools, needs_nvcc=torch.cuda.is_available(), is_compiled=is_compiled) is None:
        return None  # without the seconds that importing DeepSpeed takes
    installed: Any = _part_of_deepspeed("git_version_info")
    if installed.installed_ops.get("cpu_adam", False):  # it came compiled
        return None
    builders, base = _part_of_deepspeed("ops.op_builder"), _part_of_deepspeed("ops.op_builder.builder")
    needs_nvcc = torch.cuda.is_available() and issubclass(builders.CPUAdamBuilder, base.CUDAOpBuilder)
    return missing_tool(tools, needs_nvcc=needs_nvcc, is_compiled=is_compiled)


def _part_of_deepspeed(name: str) -> Any:
    return require(f"deepspeed.{name}", extra="deepspeed", purpose="DeepSpeed ZeRO")


def missing_tool(tools: BuildTools, *, needs_nvcc: bool, is_compiled: bool) -> str | None:
    """Return the first tool that is missing with the command that installs it; None where all exist.

    What is compiled already needs no compiler, but DeepSpeed asks for ninja all the same. DeepSpeed 0.19.8 compiles it
    by the C++ compiler alone; where its builder is one of CUDA's, nvcc is run, too.
    """
    if not tools.has_ninja:
        return "ninja is not on the PATH, with which DeepSpeed compiles its CPU Adam. Run `pip install ninja`."
    if is_compiled:
        return None
    if tools.compiler is None:
        return (
            "there is no C++ compiler (`c++`, or what CXX names), with which DeepSpeed compiles its CPU Adam. Run "
            "`apt-get install g++`."
        )
    if needs_nvcc and tools.nvcc is None:
        toolkit = str(torch.version.cuda or "").replace(".", "-")
        return (
            "there is no nvcc (`$CUDA_HOME/bin/nvcc`), with which this DeepSpeed compiles its CPU Adam on a machine "
            f"with a GPU. Run `apt-get install cuda-toolkit-{toolkit} && export CUDA_HOME=/usr/local/cuda`."
        )
    return None
