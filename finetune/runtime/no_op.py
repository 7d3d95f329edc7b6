"""The function that does nothing, for callbacks that nobody needs."""


def no_op(*_: object) -> None:
    """Do nothing."""
