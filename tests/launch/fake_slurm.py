"""Stand-ins for Slurm's programs: an `srun` that starts one process per "host" on this machine."""

from pathlib import Path

_PROGRAMS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
pids=()
for ((host = 0; host < SLURM_JOB_NUM_NODES; host++)); do
  SLURM_NODEID=$host "$@" &
  pids+=($!)
done
echo "${pids[@]}" >"$FAKE/tasks"
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
""",
    "scontrol": """
case $1 in
  show) for ((host = 0; host < SLURM_JOB_NUM_NODES; host++)); do echo 127.0.0.2; done ;;
  requeue) echo "$2" >>"$FAKE/requeued" ;;
esac
""",
    "scancel": 'read -r -a pids <"$FAKE/tasks"\nkill -TERM "${pids[@]}"',
    "squeue": "echo RUNNING",
}


def install(folder: Path) -> Path:
    """Write the programs, and return the folder that comes first on the PATH; they note what they do in `folder`."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name, text in _PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    return programs


def variables(folder: Path, *, restart: int, nodes: int = 2) -> dict[str, str]:
    """Return what Slurm sets for a batch script."""
    return {
        "FAKE": str(folder),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": "host[0-1]",
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_RESTART_COUNT": str(restart),
    }
