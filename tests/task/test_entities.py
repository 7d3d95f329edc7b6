"""Entities and their scores, against the definitions that seqeval publishes (github.com/chakki-works/seqeval)."""

import pytest

from finetune.task.entities import are_entity_tags, entities, entity_scores

FOUND = {
    "B-PER I-PER O B-LOC": [(0, 1, "PER"), (3, 3, "LOC")],  # seqeval's own example of get_entities
    "O I-PER I-PER": [(1, 2, "PER")],  # an entity may begin inside
    "B-PER B-PER": [(0, 0, "PER"), (1, 1, "PER")],
    "B-PER I-LOC": [(0, 0, "PER"), (1, 1, "LOC")],  # another type is another entity
    "B-PER I-PER E-PER S-LOC": [(0, 2, "PER"), (3, 3, "LOC")],
    "I-A I-A B-A": [(0, 1, "A"), (2, 2, "A")],
    "E-A I-A": [(0, 0, "A"), (1, 1, "A")],
    "O O": [],
    "B-a-b I-a-b": [(0, 1, "a-b")],
}


@pytest.mark.parametrize("tags", FOUND)
def test_entities_are_found(tags):
    assert list(entities(tags.split())) == FOUND[tags]


def test_the_scores_of_seqevals_example():
    """The README of seqeval gives F1 0.50 for these: of 2 entities, of which 2 are predicted, 1 is right."""
    true = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    scores = entity_scores(zip(true, predicted, strict=True))
    assert (scores.precision, scores.recall, scores.f1) == (0.5, 0.5, 0.5)


def test_where_nothing_is_found_all_is_zero():
    scores = entity_scores([(["B-A", "O"], ["O", "O"])])
    assert (scores.precision, scores.recall, scores.f1) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("names", "are"), [(["O", "B-A", "I-A"], True), (["O", "I-A"], False), (["NOUN", "VERB"], False), (["O"], False)]
)
def test_tags_of_entities_are_known(names, are):
    assert are_entity_tags(names) is are
