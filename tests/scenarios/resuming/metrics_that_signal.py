"""A metric that sends this process SIGTERM: a signal at a known moment, on rank 0 alone."""

import os
import signal


def terminate(answers: list[str], references: list[str]) -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    return float(len(answers))
