"""Accelerate files by name, and the DeepSpeed configs that they name: all of them are in the package.

In a checkout `finetune/accelerate_configs` and `finetune/ds_configs` are links to the folders at its top.
"""

import difflib
from pathlib import Path

from finetune.errors import UserError

_PACKAGE = Path(__file__).parents[1]
_HOME = _PACKAGE if (_PACKAGE / "ds_configs").is_dir() else _PACKAGE.parent  # a checkout without symbolic links

SHIPPED = _HOME / "accelerate_configs"


def accelerate_file_names() -> list[str]:
    """Return the names that stand for a file of the package: `ddp`, `fsdp2`, `zero2` and the others."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_accelerate_file(path_or_name: str) -> Path:
    """Return the file of this path, or else the file of this name in the package; raises UserError for neither."""
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    names = accelerate_file_names()
    if path_or_name in names:
        return SHIPPED / f"{path_or_name}.yaml"
    if path.is_dir():
        raise UserError(f"`{path_or_name}` is a folder. Write the path of a file, or a name: {', '.join(names)}.")
    near = path.stem if path.stem in names else next(iter(difflib.get_close_matches(path.stem, names, n=1)), None)
    meant = f" Did you mean `{near}`?" if near else ""
    raise UserError(f"`{path_or_name}` is neither a file nor a known name.{meant} Names: {', '.join(names)}.")


def find_deepspeed_file(path_text: str, *, accelerate_file: Path | None) -> Path:
    """Return the DeepSpeed config that an accelerate file names, or the path as written where there is none.

    A relative path is looked up in the current folder, next to the accelerate file and in the folder above that, and
    in the package.
    """
    path = Path(path_text)
    if path.is_absolute() or path.is_file():
        return path
    folders = () if accelerate_file is None else accelerate_file.absolute().parents[:2]
    candidates = [*(folder / path for folder in (*folders, _HOME)), _HOME / "ds_configs" / path]
    return next((candidate for candidate in candidates if candidate.is_file()), path)
