"""The script of one host, for schedulers that start one process per host with the number of the host in a variable."""

from collections.abc import Sequence

from finetune.launch.jobs.request import JobRequest, Rendezvous, launch_words, next_words
from finetune.launch.jobs.shell import ShellText, Word, command_line, quoted, render

LOCAL_LOGS = "/tmp/finetune-logs"
"""Where ranks of a run at a URL write their logs; their output is in the log of the host, too."""


def host_script(request: JobRequest, meeting: Rendezvous, *, lines: Sequence[str]) -> str:
    """Return the script for a POSIX shell, which ends as the scheduler is to know it.

    `lines` come first, and set the variables of the meeting.
    """
    logs: Word = LOCAL_LOGS
    if not request.is_at_url:
        logs = ShellText(f'{quoted(request.run_folder)}"/logs/host-${meeting.machine_rank}"')
    rank = ShellText(f'"${meeting.machine_rank}"')
    return render(
        "host.sh.jinja",
        meeting=lines,
        launch=command_line(launch_words(request, meeting, log_folder=logs)),
        next=command_line(next_words(request, run_folder=request.run_folder, code="code", machine_rank=rank)),
    )
