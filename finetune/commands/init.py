"""`finetune init`: write a recipe into a folder: its job file, and the data of recipes that need no network."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from finetune.errors import UserError
from finetune.recipes import FOLDER
from finetune.recipes.digits import digit_files
from finetune.recipes.quickstart import quickstart_files
from finetune.runtime.files.atomic import write_bytes, write_text

JOB_FILE = "job.yaml"

Files = Mapping[str, str | bytes]
"""Contents by path in the folder."""

_DATA: Mapping[str, Callable[[], Files]] = {"quickstart": quickstart_files, "image-digits": digit_files}


_LISTED = 3
"""Maximum number of files of a folder that are listed by name."""


def init(name: str | None, into: Path | None) -> None:
    """Write the recipe into the folder and print what was written; without a name, list the recipes."""
    if name is None:
        known = recipes()
        widest = max(map(len, known)) + 2
        for recipe, sentence in known.items():
            print(f"{recipe:<{widest}}{sentence}")
        return
    for written in format_written(make_recipe(name, into or Path(name))):
        print(f"wrote {written}")


def recipes() -> dict[str, str]:
    """Return each recipe's name and its first sentence, by name."""
    return {path.stem: _first_sentence(path) for path in sorted(FOLDER.glob("*.yaml"))}


def make_recipe(name: str, folder: Path) -> list[Path]:
    """Write the recipe's job file, and its data if it has any, into the folder; return the files' paths.

    Existing files with the same content are left alone. Raises UserError, and writes nothing, if files with other
    content exist or the recipe is unknown.
    """
    contents = _contents(name)
    different = [file for file, content in contents.items() if _differs(folder / file, content)]
    if different:
        more = f" and {len(different) - _LISTED:,} more" if len(different) > _LISTED else ""
        raise UserError(
            f"{folder} already holds {', '.join(different[:_LISTED])}{more} with different content. "
            "Choose another folder with --into, or move the old files away."
        )
    for file, content in contents.items():
        if not (folder / file).exists():
            _write(folder / file, content)
    return [folder / file for file in contents]


def format_written(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the paths of the files; for many files in subfolders of one folder, only their number."""
    by_folder: dict[Path, list[Path]] = {}
    for path in paths:
        by_folder.setdefault(path.parent.parent, []).append(path)
    for folder, inside in by_folder.items():
        if len(inside) > _LISTED:
            yield f"{len(inside):,} files in {folder}"
        else:
            yield from map(str, inside)


def _contents(name: str) -> Files:
    known = recipes()
    if name not in known:
        raise UserError(f"Unknown recipe `{name}`. Available: {', '.join(known)}.")
    job = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    return {JOB_FILE: job, **_DATA.get(name, dict)()}


def _write(path: Path, content: str | bytes) -> None:
    if isinstance(content, bytes):
        write_bytes(path, content, survives_power_cut=False)  # there may be many files
    else:
        write_text(path, content)


def _differs(path: Path, content: str | bytes) -> bool:
    if path.is_dir():
        return True
    expected = content if isinstance(content, bytes) else content.encode("utf-8")
    return path.exists() and path.read_bytes() != expected


def _first_sentence(path: Path) -> str:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).split(". ")[0].rstrip(".") + "."
