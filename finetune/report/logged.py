"""Which steps are told to readers who do not want every one."""


def is_logged(step: int, *, every_steps: int, num_steps: int) -> bool:
    """Tell whether the step's numbers are shown: each `every_steps`-th and the last."""
    return step % every_steps == 0 or step == num_steps
