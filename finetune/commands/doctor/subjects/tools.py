"""Runs programs and gatherers with a time limit; one that is missing, fails or hangs is reported."""

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TOOL_SECONDS = 10.0


def run_tool(command: Sequence[str], *, seconds: float = TOOL_SECONDS) -> str:
    """Return the output of a program; raises OSError if it is missing, fails or takes too long."""
    name = " ".join(command[:3])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise OSError(f"`{command[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"`{name}` did not answer within {seconds:g} s") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise OSError(f"`{name}` failed: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def gather_all(gatherers: Mapping[str, Callable[[], Any]], *, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run the gatherers concurrently; return their results by name, and the reasons of those that failed.

    A gatherer that hangs, as a driver may, stays in a daemon thread, which does not keep the process alive.
    """
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def gather(name: str, function: Callable[[], Any]) -> None:
        try:
            results[name] = function()
        except Exception as error:  # of any library or tool: the others still answer
            failed[name] = f"{name}: {error or type(error).__name__}"

    threads = {
        name: threading.Thread(target=gather, args=(name, function), daemon=True, name=f"gather {name}")
        for name, function in gatherers.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(seconds)
    late = {name: f"{name}: no answer within {seconds:g} s" for name, thread in threads.items() if thread.is_alive()}
    unread = {**failed, **late}
    return {name: value for name, value in results.items() if name not in late}, [*unread.values()]
