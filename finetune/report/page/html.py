"""Self-contained pages: template, style, charts.js and plotly.js in one file, with all data escaped.

Everything is escaped where it stands, and only scripts that bear the page's random nonce run (its content security
policy), so an answer that holds `</script>` stays text. Plotly's file is read from its package, which is not imported,
and stands in the page compressed: with it a page has 2 MB, not 5.
"""

import base64
import gzip
import importlib.util
import json
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from finetune.errors import MissingPackage

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, *, folder: Path, data: Mapping[str, Any], **values: Any) -> str:
    """Return the page rendered from the template in the folder and the values, with `data` for charts.js.

    Raises MissingPackage where plotly is not installed.
    """
    return (
        _environment(folder)
        .get_template(template)
        .render(
            **values,
            nonce=secrets.token_urlsafe(16),
            data=script_json(data),
            style=_trusted("page.css"),
            charts=_trusted("charts.js"),
            plotly=_plotly(),
        )
    )


def script_json(value: Any) -> Markup:
    """Return JSON that is safe within `<script type="application/json">`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # ASCII: no U+2028 either, which ends a line in old readers


@cache
def _environment(folder: Path) -> Environment:
    loader = FileSystemLoader([folder, TEMPLATES])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["count"] = "{:,}".format
    return environment


@cache
def _trusted(name: str) -> Markup:
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


@cache
def _plotly() -> Markup:
    spec = importlib.util.find_spec("plotly")
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise MissingPackage(
            "report.html is drawn with plotly, which is not installed. Install it with: pip install plotly"
        )
    return Markup(base64.b64encode(gzip.compress(path.read_bytes(), mtime=0)).decode("ascii"))
