"""docs/how-to/doctor.md lists every check."""

import re
from pathlib import Path

from finetune.commands import doctor

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "doctor.md"
CALL = re.compile(r'(?:must_fix|should_fix|note|finding|Finding)\(\s*"([a-z0-9-]+)",')


def test_every_check_is_on_the_page_and_nothing_else():
    sources = "".join(file.read_text() for file in Path(doctor.__path__[0]).rglob("*.py"))
    keys = set(CALL.findall(sources))
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(keys) > 60
    assert {key for row in rows for key in re.findall(r"`([a-z0-9-]+)`", row)} == keys
