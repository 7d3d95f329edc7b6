"""The tools with which DeepSpeed compiles its CPU Adam, which ZeRO with an offloaded optimizer uses.

DeepSpeed compiles it in the first run on a machine, after loading model and data. Missing tools are reported before.
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
    """The tools that compile an extension."""

    has_ninja: bool
    compiler: str | None  # the path of `CXX` or `c++`, if it exists
    nvcc: str | None


def build_tools(variables: Mapping[str, str] = os.environ, *, which: Which = shutil.which) -> BuildTools:
    """Return the tools that torch would compile with."""
    home = cpp_extension.CUDA_HOME
    nvcc = None if home is None else which(str(Path(home, "bin", "nvcc")))
    return BuildTools(which("ninja") is not None, which(variables.get("CXX", "c++")), nvcc)


def missing_for_cpu_adam() -> str | None:
    """Return the missing tool for DeepSpeed's CPU Adam, and the command that installs it; None if all exist.

    Raises MissingPackage without DeepSpeed.
    """
    tools, is_compiled = build_tools(), any(extensions_folder().glob("*/cpu_adam/*.so"))
    if missing_tool(tools, needs_nvcc=torch.cuda.is_available(), is_compiled=is_compiled) is None:
        return None  # saves the seconds of importing DeepSpeed
    installed: Any = _part_of_deepspeed("git_version_info")
    if installed.installed_ops.get("cpu_adam", False):  # a precompiled wheel
        return None
    builders, base = _part_of_deepspeed("ops.op_builder"), _part_of_deepspeed("ops.op_builder.builder")
    needs_nvcc = torch.cuda.is_available() and issubclass(builders.CPUAdamBuilder, base.CUDAOpBuilder)
    return missing_tool(tools, needs_nvcc=needs_nvcc, is_compiled=is_compiled)


def _part_of_deepspeed(name: str) -> Any:
    return require(f"deepspeed.{name}", extra="deepspeed", purpose="DeepSpeed ZeRO")


def missing_tool(tools: BuildTools, *, needs_nvcc: bool, is_compiled: bool) -> str | None:
    """Return the first missing tool with the command that installs it; None if all exist.

    A compiled extension needs no compiler, but DeepSpeed still requires ninja. DeepSpeed 0.19.8 uses only the C++
    compiler; if its builder is a CUDA builder, it also runs nvcc.
    """
    if not tools.has_ninja:
        return "ninja, with which DeepSpeed compiles its CPU Adam, is not on the PATH. Run `pip install ninja`."
    if is_compiled:
        return None
    if tools.compiler is None:
        return (
            "DeepSpeed compiles its CPU Adam with a C++ compiler (`c++`, or that of CXX), and none is installed. Run "
            "`apt-get install g++`."
        )
    if needs_nvcc and tools.nvcc is None:
        toolkit = str(torch.version.cuda or "").replace(".", "-")
        return (
            "this DeepSpeed compiles its CPU Adam with nvcc (`$CUDA_HOME/bin/nvcc`) on a machine with a GPU, and nvcc "
            f"is not installed. Run `apt-get install cuda-toolkit-{toolkit} && export CUDA_HOME=/usr/local/cuda`."
        )
    return None
