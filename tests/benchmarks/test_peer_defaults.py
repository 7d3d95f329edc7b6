"""What other trainers' packages say of keys that are not written, read without importing them."""

import ast
import json
import subprocess
import warnings

import pytest

from benchmarks import peer_defaults
from benchmarks.peer_defaults import GROUPS, TABLE, VERSIONS, Sources, differences, format_table, read_table

SOURCE = """
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

LIMIT = 7

class Strategy(str, Enum):
    EPOCH = "epoch"

class Elsewhere(Base):
    pass

@dataclass
class Common:
    rate: float = field(default=5e-5, metadata={"help": "x"})
    names: list[str] = field(default_factory=lambda: ["a", "b"])
    strategy: Strategy = field(default=Strategy.EPOCH)

@dataclass
class Own(Common, Elsewhere):
    rate: float = 1e-6
    limit: int = LIMIT
    made: dict = field(default_factory=make)
    required: str
    revision: str | None = Field(default=None, alias="model_revision")
    first: int = Field(3, description="x")

def rows(tokenizer, *, source: str = "org/a", packed: bool = False, column=None):
    cfg.get("steps", 4)
    other.get("not_a_key", 5)

cleaned = partial(rows, source="org/b")

def _configure_saves(self):
    if self.cfg.steps:
        kwargs["save_strategy"] = "steps"
    else:
        kwargs["save_strategy"] = "epoch"
    kwargs["save_total_limit"] = self.cfg.limit if self.cfg.limit else 4
    warmup_steps = min(int(0.03 * total), 100)
"""


@pytest.fixture
def sources():
    return Sources([ast.parse(SOURCE)])


def test_defaults_of_a_class_are_its_own_over_those_of_its_bases(sources):
    assert sources.defaults("Own") == {
        "rate": 1e-6,
        "names": ["a", "b"],
        "strategy": "epoch",
        "limit": 7,
        "made": None,  # a function makes it
        "required": None,
        "revision": None,
        "model_revision": None,  # its alias is a key, too
        "first": 3,
    }


def test_defaults_of_a_function_hold_for_what_is_made_of_it(sources):
    assert sources.defaults("rows") == {"source": "org/a", "packed": False, "column": None}
    assert sources.defaults("cleaned") == {"source": "org/b", "packed": False, "column": None}


def test_keys_read_with_get_have_the_default_of_the_call(sources):
    assert sources.defaults("get") == {"steps": 4}


def test_a_builder_s_fallback_is_the_default_of_its_key(sources):
    expected = {"save_strategy": "epoch", "save_total_limit": 4, "warmup_ratio": 0.03, "warmup_steps_limit": 100}
    assert sources.defaults("_configure_saves") == expected


def test_a_name_that_a_package_no_longer_has_is_an_error(sources):
    with pytest.raises(KeyError, match="Gone"):
        sources.defaults("Gone")


def test_the_table_is_json_whatever_texts_are_in_it():
    table = {"versions": {"a": "1"}, "defaults": {"a B": {f"key_{n}": f"text, with: {n} blanks" for n in range(40)}}}
    text = format_table(table)
    assert json.loads(text) == table and max(map(len, text.splitlines())) <= 120


def test_a_key_with_another_default_is_named():
    old = {"defaults": {"a B": {"rate": 1, "gone": None, "same": 2}}}
    lines = list(differences(old, {"defaults": {"a B": {"rate": 2, "new": True, "same": 2}}}))
    assert lines == [
        "a B: gone: null in the table, absent in the package",
        "a B: new: absent in the table, true in the package",
        "a B: rate: 1 in the table, 2 in the package",
    ]


def test_the_table_has_every_group_of_these_versions():
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    assert table["versions"] == VERSIONS
    assert list(table["defaults"]) == [peer_defaults.group_name(group) for group in GROUPS]
    assert sum(map(len, table["defaults"].values())) > 900
    assert format_table(table) == TABLE.read_text(encoding="utf-8")


@pytest.mark.slow  # downloads
@pytest.mark.parametrize("package", VERSIONS)
def test_the_table_equals_the_defaults_in_the_packages(package, tmp_path):
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    try:
        found = read_table({package: VERSIONS[package]}, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{package} {VERSIONS[package]} cannot be downloaded: {error.stderr.strip()[-200:]}")
    assert found["defaults"] and list(differences(table, found)) == []


@pytest.mark.slow  # downloads
@pytest.mark.parametrize("package", [package for package in VERSIONS if package != "torch"])  # a large one
def test_a_newer_release_with_other_defaults_is_a_warning(package, tmp_path):
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    try:
        found = read_table({package: None}, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the newest {package} cannot be downloaded: {error.stderr.strip()[-200:]}")
    version = found["versions"][package]
    changed = list(differences(table, found))
    assert version != VERSIONS[package] or not changed
    if changed:
        what = "; ".join(changed[:5])
        warnings.warn(f"{package} {version} has {len(changed)} other defaults than the table: {what}", stacklevel=1)
