"""Amounts as people read them."""


def size_text(num_bytes: int) -> str:
    """Return a size in decimal units.

    >>> size_text(1_200_000_000), size_text(363_900)
    ('1.2 GB', '363.9 kB')
    """
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
