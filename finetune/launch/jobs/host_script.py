"""The script of one host, for schedulers that start one process per host with the number of the host in a variable."""

from collections.abc import Mapping

from finetune.launch.jobs.request import JobRequest, Rendezvous, launch_words, next_words
from finetune.launch.jobs.shell import ShellText, Word, command_line, quoted, render

LOCAL_LOGS = "/tmp/finetune-logs"
"""Where ranks of a run at a URL write their logs; their output is in the log of the host, too."""


MEETING = Rendezvous("MACHINE_RANK", "MASTER_ADDR", "MASTER_PORT")


def host_script(request: JobRequest, variables: Mapping[str, str]) -> str:
    """Return the script for a POSIX shell, which ends as the scheduler is to know it.

    `variables` are those of MEETING, as the shell finds them out on this scheduler.
    """
    needed = [MEETING.machine_rank] if request.is_single else list(variables)
    logs: Word = LOCAL_LOGS
    if not request.is_at_url:
        logs = ShellText(f'{quoted(request.run_folder)}"/logs/host-${MEETING.machine_rank}"')
    rank = ShellText(f'"${MEETING.machine_rank}"')
    return render(
        "host.sh.jinja",
        meeting=[f"{name}={variables[name]}" for name in needed],
        launch=command_line(launch_words(request, MEETING, log_folder=logs)),
        next=command_line(next_words(request, run_folder=request.run_folder, code="code", machine_rank=rank)),
    )
