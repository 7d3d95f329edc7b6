"""Reads a text file that a user names: whatever stands at the path, the answer comes at once."""

import errno
import os
import pathlib
import stat

from finetune.config.limits import MAX_FILE_BYTES


def read_text(path: pathlib.Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the file's text; raises OSError with the reason, or UnicodeDecodeError where it is not UTF-8.

    Only a regular file is read: a pipe or a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
        content = file.read(max_bytes + 1)
        if content is None:  # the kernel's log is regular by its mode, and has nothing to say
            raise OSError(errno.EAGAIN, "nothing comes from it", str(path))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes / (1 << 20):g} MiB", str(path))
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
