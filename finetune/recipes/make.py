"""`finetune init`: a recipe becomes a folder with a job file and, for the quickstart, its data."""

from collections.abc import Callable, Mapping
from pathlib import Path

from finetune.errors import UserError
from finetune.recipes.quickstart import quickstart_files
from finetune.runtime.files import write_text

JOB_FILE = "job.yaml"

_DATA: Mapping[str, Callable[[], Mapping[str, str]]] = {"quickstart": quickstart_files}


def recipes() -> dict[str, str]:
    """Return each recipe's name and its first sentence, by name."""
    return {path.stem: _first_sentence(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def make_recipe(name: str, folder: Path) -> list[Path]:
    """Write the recipe's job file, and its data where it brings some, into the folder; return the files' paths.

    Files that are there already with the same content are left alone; with another content, UserError names them and
    nothing is written. Raises UserError for an unknown recipe.
    """
    texts = _texts(name)
    different = [file for file, text in texts.items() if _differs(folder / file, text)]
    if different:
        raise UserError(
            f"{folder} already holds {', '.join(different)} with another content. "
            "Choose another folder with --into, or move the old files away."
        )
    for file, text in texts.items():
        if not (folder / file).exists():
            write_text(folder / file, text)
    return [folder / file for file in texts]


def _texts(name: str) -> dict[str, str]:
    known = recipes()
    if name not in known:
        raise UserError(f"There is no recipe `{name}`. There are: {', '.join(known)}.")
    job = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    return {JOB_FILE: job, **_DATA.get(name, dict)()}


def _differs(path: Path, text: str) -> bool:
    if path.is_dir():
        return True
    return path.exists() and path.read_bytes() != text.encode("utf-8")


def _first_sentence(path: Path) -> str:
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# "):
            break
        comment.append(line.removeprefix("# "))
    return " ".join(comment).split(". ")[0].rstrip(".") + "."
