"""A hook of mkdocs: files of the repository that the pages link to are in the site, too, under repository/."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<=\]\()[^)\s:#]+(?=[)#])")
"""The path of a link to a file."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that a page of the site links to, and those that these link to."""
    pages, added = list(DOCS.rglob("*.md")), set()
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path = (page.parent / link).resolve()
            if path.is_file() and not path.is_relative_to(DOCS) and path not in added:
                added.add(path)
                files.append(File.generated(config, _place(path), abs_src_path=str(path)))
                pages += [path] if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with links that hold within the site."""
    source = Path(page.file.abs_src_path)

    def in_site(link: re.Match[str]) -> str:
        path = (source.parent / link[0]).resolve()
        return os.path.relpath(_place(path), Path(page.file.src_uri).parent) if path.is_file() else link[0]

    return LINK.sub(in_site, markdown)


def _place(path: Path) -> str:
    """Return where a file of the repository is in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix().lstrip('.')}"
