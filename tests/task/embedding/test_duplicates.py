"""Which passages are left out, against the definition, on all small steps that Hypothesis thinks of."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.task.embedding.similarity_losses import masked_pairs

TEXTS = st.integers(0, 5)
STEPS = st.tuples(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8), st.lists(TEXTS, max_size=5))


@settings(max_examples=200, deadline=None)
@given(step=STEPS, first=st.integers(0, 3), count=st.integers(0, 8))
def test_passages_of_equal_anchors_count_as_positives(step, first, count):
    pairs, negatives = step
    anchors, positives = (np.array(each) for each in zip(*pairs, strict=True))
    passages = np.concatenate([positives, np.array(negatives, np.int64)])
    rows = range(min(first, len(pairs)), min(first + count, len(pairs)))
    right = set(pairs)
    found = masked_pairs(anchors, passages, rows)
    expected = [(i, j) for i in rows for j in range(len(passages)) if j != i and (anchors[i], passages[j]) in right]
    assert list(map(tuple, found.T.tolist())) == expected
    back = masked_pairs(positives, anchors, rows)
    expected = [(i, j) for i in rows for j in range(len(pairs)) if j != i and (anchors[j], positives[i]) in right]
    assert list(map(tuple, back.T.tolist())) == expected


def test_no_passage_is_masked_in_a_step_without_duplicates():
    assert masked_pairs(np.arange(4), np.arange(10, 18), range(4)).shape == (2, 0)
