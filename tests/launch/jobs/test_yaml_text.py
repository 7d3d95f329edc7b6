"""The YAML is read alike by readers of YAML 1.1 and 1.2."""

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from finetune.launch.jobs.yaml_text import yaml_text
from tests.launch.jobs.hostile import HOSTILE

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
VALUES = st.recursive(
    TEXTS | st.integers(-10, 10) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def read_both(text: str) -> tuple[list, list]:
    return list(yaml.safe_load_all(text)), list(YAML(typ="safe").load_all(text))


def test_hostile_texts_are_the_same_for_both_readers():
    document = {"list": list(HOSTILE), "map": {word: word for word in HOSTILE}}
    older, newer = read_both(yaml_text([document, document], comment="two\nlines"))
    assert older == newer == [document, document]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=4))
def test_any_document_is_the_same_for_both_readers(document):
    older, newer = read_both(yaml_text([document], comment="x"))
    assert older == newer == [document]


def test_a_script_keeps_its_lines():
    text = yaml_text([{"run": "first\n  second\n"}], comment="x")
    assert "run: |\n  first\n    second\n" in text
