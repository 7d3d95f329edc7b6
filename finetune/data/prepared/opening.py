"""A prepared set as it is opened from the cache: verified; where it is damaged, set aside and made again."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from finetune.data.prepared.store import Identity, PreparedSet
from finetune.data.verified.damage import DamagedSet, damaged_copies, put_aside
from finetune.errors import DataError

VERIFIED_AT_ONCE_BYTES = 256 << 20
"""A set up to this size is verified before it is used, in hundredths of a second; a larger one in the background."""

_MOST_ATTEMPTS = 3

Say = Callable[[str], None]


def opened(
    folder: Path, make: Callable[[], bool], *, made_of: Identity, key: str, say: Say
) -> tuple[PreparedSet, bool]:
    """Return the set, and whether `make` has made it just now; raises DataError where it is damaged again and again.

    `make` makes the folder unless it is there. A large set is verified in the background from now on.
    """
    for _ in range(_MOST_ATTEMPTS):
        is_new = make()
        try:
            prepared = _opened(folder, made_of)
        except DamagedSet as damage:
            found: DamagedSet = damage
            _put_aside(damage, partial(_is_damaged, folder, made_of), key=key, say=say)
            continue
        if copies := damaged_copies(folder):
            say(
                f"warning: {key}: its prepared set was damaged and has been made again; what was damaged is kept as "
                f"{', '.join(map(str, copies))}. Look at the disk and the memory of this machine, then delete it."
            )
        if not _is_small(prepared):
            prepared.verification.start()
        prepared.remake = partial(_remade, make=make, made_of=made_of, key=key, say=say)
        return prepared, is_new
    raise DataError(
        f"{key}: {found}, and so were those that were made in its place. Look at the disk and the memory of this "
        "machine, or set data.cache_folder to another disk."
    )


def mend(prepared: PreparedSet, *, seconds: float | None) -> None:
    """Wait for the verification, at most so long; what is found to be damaged is made again and read from then on."""
    prepared.verification.wait(seconds)
    if prepared.verification.problem and prepared.remake is not None:
        prepared.reopen(prepared.remake(prepared))


def _opened(folder: Path, made_of: Identity) -> PreparedSet:
    prepared = PreparedSet(folder, shards=made_of.shards)
    if prepared.fingerprint != made_of.fingerprint:
        raise DamagedSet(folder, "it was made of something else")
    if _is_small(prepared):
        prepared.verify()
    return prepared


def _is_small(prepared: PreparedSet) -> bool:
    return prepared.verification.size_bytes <= VERIFIED_AT_ONCE_BYTES


def _is_damaged(folder: Path, made_of: Identity) -> bool:
    try:
        _opened(folder, made_of).verification.close()
    except DamagedSet:
        return True
    return False


def _remade(prepared: PreparedSet, *, make: Callable[[], bool], made_of: Identity, key: str, say: Say) -> PreparedSet:
    damage = DamagedSet(prepared.folder, prepared.verification.problem or "")
    _put_aside(damage, prepared.is_still_damaged, key=key, say=say)
    return opened(prepared.folder, make, made_of=made_of, key=key, say=say)[0]


def _put_aside(damage: DamagedSet, is_damaged: Callable[[], bool], *, key: str, say: Say) -> None:
    aside = put_aside(damage.folder, is_damaged, say=say)
    if aside is not None:
        say(f"warning: {key}: {damage}. It is set aside as {aside.name} and made again.")
