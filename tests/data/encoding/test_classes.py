"""Classes by name: what counts as a label, their order, and what each weighs."""

import pytest

from finetune.data.encoding.labelled import balanced_weights, label_name, positive_weights, sort_names


@pytest.mark.parametrize(
    ("label", "name"), [("spam", "spam"), (3, "3"), (3.0, "3"), (-1, "-1"), (True, "true"), (False, "false")]
)
def test_a_label_has_a_name(label, name):
    assert label_name(label) == name


def test_numbers_are_sorted_by_size_and_texts_as_texts():
    assert sort_names(["10", "9", "-1"]) == ["-1", "9", "10"]
    assert sort_names(["b", "10", "9"]) == ["10", "9", "b"]


def test_balanced_weights_average_one_over_the_rows():
    counts = [6, 3, 0, 1]
    weights = balanced_weights(counts)
    assert weights == pytest.approx((10 / 18, 10 / 9, 1.0, 10 / 3))
    assert sum(count * weight for count, weight in zip(counts, weights, strict=True)) / 10 == pytest.approx(1.0)


def test_positive_weights_of_multiple_labels_grow_with_their_rarity():
    assert positive_weights([2, 5, 10, 0], 10) == (4.0, 1.0, 1.0, 1.0)
