"""docs/how-to/before-a-run.md lists every check, and each has its texts."""

import re
from pathlib import Path

from finetune.commands import doctor
from finetune.commands.doctor.findings import finding_texts

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "before-a-run.md"
CALL = re.compile(r'(?<!\w)finding\(\s*"([a-z0-9/-]+)"')


def test_every_finding_of_the_code_has_its_texts_and_nothing_else():
    sources = "".join(file.read_text() for file in Path(doctor.__path__[0]).rglob("*.py"))
    used = CALL.findall(sources)
    assert len(used) > 70 and set(used) == finding_texts().keys()
    assert all(row.keys() == {"what", "why", "fix"} and all(row.values()) for _, row in finding_texts().values())


def test_every_check_is_on_the_page_and_nothing_else():
    keys = {name.partition("/")[0] for name in finding_texts()}
    rows = [
        line.split("|")[1]
        for line in PAGE.read_text().split("\n## Check the machine\n")[1].splitlines()
        if line.startswith("| `")
    ]
    assert len(keys) > 60
    assert {key for row in rows for key in re.findall(r"`([a-z0-9-]+)`", row)} == keys
