"""Reads files and JSON: only regular files of a bounded size, validated by a schema.

Reading a device or a FIFO may block forever. The weights of a GGUF file are quantized for inference, so it is no model.
"""

import errno
import json
import os
import shlex
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from finetune.errors import NotAFile

FILE_TYPES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def require_regular(path: Path) -> os.stat_result:
    """Return the stat of the regular file at the path; raises NotAFile for anything else, OSError if it is missing."""
    return _regular(path.stat(), path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking; raises NotAFile for anything else."""
    require_regular(path)
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _regular(os.fstat(number), path)  # it may have been replaced
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def _regular(state: os.stat_result, path: Path) -> os.stat_result:
    if not stat.S_ISREG(state.st_mode):
        file_type = FILE_TYPES.get(stat.S_IFMT(state.st_mode), "of an unknown type")
        raise NotAFile(0, f"it is {file_type}, not a regular file", str(path))
    return state


T = TypeVar("T")

MAX_BYTES = 512 << 20
"""Size limit of a file that is read whole: twice that of the index of a checkpoint of a million tensors."""


_MIN_READ_BYTES = 1 << 20
"""For a growing file, or one whose size is unknown until it is read."""


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the file's content; raises OSError for anything but a regular file of at most that size."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EINVAL, f"has {size} bytes; the maximum is {max_bytes}", str(path))
        return file.read(min(max_bytes, max(size, _MIN_READ_BYTES)))  # this many bytes are allocated first


def parse_json(content: bytes | str) -> Any:
    """Return the value; raises ValueError for anything but valid JSON, or for too deep nesting."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Return the file's value; raises only OSError or ValueError."""
    return parse_json(read_regular(path))


def parse_as(schema: TypeAdapter[T], content: bytes) -> T:
    """Return the JSON validated by the schema; raises ValueError that names the first mismatch."""
    try:
        return schema.validate_json(content)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Return the first problem in one line, without the value itself."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    key = ".".join(str(part)[:80] for part in first["loc"])
    return f"{key}: {first['msg']}" if key else str(first["msg"])


CONVERSION = (
    "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; folder, file, target = sys.argv[1:]; "
    "model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype='float32'); "
    "model.hf_quantizer = None; del model.config.quantization_config; model.save_pretrained(target); "
    "AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)"
)
"""Python that converts a GGUF file, with the arguments folder, file and target.

transformers 5 dequantizes the weights when it loads them, but refuses to save them while the two attributes are set.
"""

_CONFIGS = ("config.json", "adapter_config.json")


def gguf_advice(path: Path) -> str | None:
    """Return how to convert a GGUF file, or the one in a folder that has no other model; None for any other path."""
    files = [path] if path.suffix.lower() == ".gguf" and path.is_file() else []
    if path.is_dir() and not any((path / name).exists() for name in _CONFIGS):
        files = sorted(path.glob("*.gguf"))
    if not files:
        return None
    file = files[0].absolute()
    target = f"./{file.stem}"
    return (
        f"{file} is a GGUF file: its weights are quantized for inference. Convert it once (`pip install gguf` first), "
        f"and give the folder {target}, which will have them in float32:\n"
        f'python -c "{CONVERSION}" {shlex.join((str(file.parent), file.name, target))}'
    )
