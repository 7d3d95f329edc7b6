"""What compiles and launches: locks of killed builds, compilers, the default accelerate config."""

from collections.abc import Iterator

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.host import HostFacts, Lock, SoftwareFacts
from finetune.commands.doctor.facts.launch import Facts
from finetune.runtime.upstream import ABANDONED, BUILDING


def check_software(host: HostFacts, facts: Facts) -> Iterator[Finding]:
    """Yield what keeps DeepSpeed from compiling, or launches something else than is thought."""
    software = host.software
    yield from _locks(software)
    if software.missing_for_cpu_adam is not None:
        yield should_fix(
            "compiler",
            f"ZeRO with an offloaded optimizer (zero2_offload, zero3_offload) cannot start: "
            f"{software.missing_for_cpu_adam.partition('. Run ')[0].rstrip('.')}",
            why="DeepSpeed compiles its Adam for the CPU at the first run on a machine; nothing else needs it",
            fix=software.missing_for_cpu_adam.partition("Run ")[2].strip("`. ") or "apt-get install g++ ninja-build",
        )
    nvcc, cuda = software.nvcc, software.torch_cuda
    if nvcc is not None and cuda is not None and nvcc.split(".")[0] != cuda.split(".")[0]:
        toolkit = cuda.replace(".", "-")
        yield should_fix(
            "nvcc",
            f"nvcc is of CUDA {nvcc}, and torch is built for CUDA {cuda}",
            why="DeepSpeed refuses to compile its extensions (CUDAMismatchException)",
            fix=f"apt-get install cuda-toolkit-{toolkit} && export CUDA_HOME=/usr/local/cuda-{cuda}",
        )
    yield from _accelerate_config(host)


def _locks(software: SoftwareFacts) -> Iterator[Finding]:
    for lock in software.locks:
        finding = note if lock.state == BUILDING else must_fix
        yield finding(
            "build-lock",
            lock.text.rstrip("."),
            why="torch waits for this file without a word and without a limit",
            fix=_lock_fix(lock),
        )


def _lock_fix(lock: Lock) -> str:
    if lock.state == BUILDING:
        return "wait until it has compiled"
    return f"rm {lock.path}" + ("   # or launch under DeepSpeed, which removes it" if lock.state == ABANDONED else "")


def _accelerate_config(host: HostFacts) -> Iterator[Finding]:
    path, settings = host.software.accelerate_config, host.software.accelerate_settings
    if path is None:
        return
    num_gpus = len(host.gpus.gpus)
    wrong = []
    if num_gpus and settings.get("use_cpu", "").lower() in ("true", "yes"):
        wrong.append("use_cpu: true, and there are GPUs")
    if num_gpus > 1 and settings.get("num_processes") == "1":
        wrong.append(f"num_processes: 1, and there are {num_gpus} GPUs")
    if settings.get("mixed_precision", "no") not in ("no", "null", "None", "False"):
        wrong.append(f"mixed_precision: {settings['mixed_precision']}, which train.precision decides")
    if settings.get("num_machines", "1") not in ("1", "0"):
        wrong.append(f"num_machines: {settings['num_machines']}")
    finding = should_fix if wrong else note
    yield finding(
        "accelerate-config",
        f"{path} exists{', with ' if wrong else ''}{'; '.join(wrong)}",
        why="`accelerate launch` without --config_file takes it, though no command names it",
        fix="accelerate launch --config_file accelerate_configs/ddp.yaml -m finetune --config job.yaml; or delete it",
    )
