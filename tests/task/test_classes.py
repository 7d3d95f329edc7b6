"""Which classes there are, what each weighs, and the losses as sums that no cut of the batch changes."""

import pytest
import torch

from finetune.config.sections.task import ClassificationSection, TaskSection
from finetune.data.encoding.labelled import label_name
from finetune.errors import DataError
from finetune.task.classes import find_classes, multi_label_loss_sum, regression_loss_sum
from finetune.task.protocol import TaskContext
from tests.refusals import refused

RESULTS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0], [0.0, 0.0, 3.0]], dtype=torch.float64)


def materials(found, data, facts=None, **section):
    rows = [{"text": "a", "label": label} for label in found]
    task = TaskSection(name="text_classification", classification=ClassificationSection(**section))
    return TaskContext(task, data, rows=lambda: rows, facts=facts)


def of_row(row):
    return [row["label"]]


def test_classes_are_those_of_the_rows_sorted(data):
    found = find_classes(materials(["b", "a", "b"], data), of_row)
    assert (found.classes.names, found.weights) == (("a", "b"), None)
    assert found.head_values == {"num_labels": 2, "id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}


def test_written_classes_keep_their_order_and_no_row_is_read(data):
    def rows():
        raise AssertionError

    task = TaskSection(
        name="text_classification", classification=ClassificationSection(labels=["b", "a"], class_weights=[2.0, 0.5])
    )
    found = find_classes(TaskContext(task, data, rows=rows), of_row)
    assert (found.classes.names, found.weights) == (("b", "a"), (2.0, 0.5))


def test_balanced_weights_come_from_the_rows_in_the_order_of_the_classes(data):
    section = {"labels": ["b", "a"], "class_weights": "balanced"}
    assert find_classes(materials(["b", "a", "b", "b"], data, **section), of_row).weights == (4 / 6, 4 / 2)


def test_the_frequency_of_each_class_is_logged(data):
    section = {"class_weights": "balanced"}
    assert find_classes(materials(["b", "a", "b", "b"], data, **section), of_row).data_facts.lines == (
        "data.train: 2 classes: `a` 1 (weight 2), `b` 3 (weight 0.667)",
    )


def test_recorded_classes_rebuild_the_encoder_without_rows(data):
    first = find_classes(materials(["b", "a", "a"], data, class_weights="balanced"), of_row)
    again = find_classes(materials([], data, facts=first.data_facts.values, class_weights="balanced"), of_row)
    assert again == first


@pytest.mark.parametrize(
    ("labels", "fact"), [(["a", "a"], "1 class (`a`)"), ([0.5, 0.25], "(0.5)"), (range(10_001), "10,001")]
)
def test_labels_that_do_not_form_classes_are_rejected(data, labels, fact):
    with refused(DataError, fact):
        find_classes(materials(labels, data), of_row)


def several(found, data, **section):
    return find_classes(materials(found, data, kind="multi_label", **section), lambda row: row["label"])


VECTORS = {
    "a value twice": [[1, 0, 1], [0, 1, 0], [0, 0, 0]],
    "numbers with a point": [[1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]],
    "booleans": [[True, False, True], [False, True, False], [False, False, False]],
    "an empty list for none": [[1, 0, 1], [0, 1, 0], []],
    "a row without a label": [[1, 0, 1], None, [0, 1, 0]],
}


@pytest.mark.parametrize("name", VECTORS)
def test_lists_of_0_and_1_with_a_value_twice_are_vectors_of_classes_and_this_is_logged(data, name):
    found = several(VECTORS[name], data)
    assert (found.classes.names, found.counts, found.is_vector) == (("0", "1", "2"), (1, 1, 1), True)
    assert found.lines == ("data.train: every list of labels has 3 numbers, 0 or 1, and each position is a class",)
    again = find_classes(materials([], data, facts=found.data_facts.values, kind="multi_label"), of_row)
    assert again.is_vector


NAMES = {
    "other numbers": [[1, 0, 1], [0, 2, 0]],
    "other lengths": [[1, 0, 1], [0, 1]],
    "no value twice": [[0, 1], [0, 1]],
    "one class each": [[0], [1]],
}


@pytest.mark.parametrize("name", NAMES)
def test_other_lists_are_names_of_classes(data, name):
    found = several(NAMES[name], data)
    assert (found.classes.names, found.is_vector) == (tuple("012"[: 3 if name == "other numbers" else 2]), False)


def test_two_classes_in_both_orders_are_a_vector(data):
    assert several([[0, 1], [1, 0]], data).is_vector
    assert not several([[0, 1], [0, 1]], data).is_vector


@pytest.mark.parametrize(
    ("labels", "is_vector"), [(["a", "b", "c"], False), (["0", "1", "2"], True), (["0", "1"], False)]
)
def test_written_classes_decide_what_lists_of_0_and_1_are(data, labels, is_vector):
    found = several([[1, 0, 1], [0, 1, 0]], data, labels=labels)
    assert (found.classes.names, found.is_vector) == (tuple(labels), is_vector)


def test_written_classes_have_the_weights_of_their_place_in_the_vector(data):
    found = several([[1, 0, 1], [1, 0, 0]], data, labels=["a", "b", "c"], class_weights="balanced")
    assert (found.counts, found.weights) == ((2, 0, 1), (1.0, 1.0, 1.0))


def test_a_label_that_is_listed_twice_counts_once(data):
    found = several([["a", "a"], ["b"], ["b"], []], data, class_weights="balanced")
    assert (found.counts, found.weights) == ((1, 2), (3.0, 1.0))


def test_classes_of_objects_keep_their_order_and_one_that_no_row_has_is_a_class(data):
    found = several([{"toxic": 0, "insult": 1}, {"toxic": 0, "insult": "1"}, {"toxic": -1, "insult": -1}], data)
    assert (found.classes.names, found.counts) == (("toxic", "insult"), (0, 2))


NO_LABEL = [
    ([0, 1, -1, 2], ("0", "1", "2"), "`-1` (1 times)"),
    ([0, 1, -100, -100], ("0", "1"), "`-100` (2 times)"),
    (["0", "1", "-1"], ("0", "1"), "`-1` (1 times)"),
    (["a", "b", -1], ("a", "b"), "`-1` (1 times)"),
    (["a", "b", None], ("a", "b"), None),
    (["a", "-1"], ("-1", "a"), None),
    ([-1, 1], ("-1", "1"), None),
    ([-2, -1, 0, 1], ("-2", "-1", "0", "1"), None),
]


@pytest.mark.parametrize(("labels", "names", "said"), NO_LABEL)
def test_minus_one_and_minus_100_are_no_classes_next_to_numbers_from_0(data, labels, names, said):
    found = find_classes(materials(labels, data), of_row)
    assert found.classes.names == names
    assert sum(found.counts) == sum(label_name(label) in names for label in labels if label is not None)
    assert [said in line and "task.classification.labels" in line for line in found.lines] == ([True] if said else [])


def test_minus_one_is_a_class_if_it_is_written(data):
    section = {"labels": ["-1", "0", "1"], "class_weights": "balanced"}
    found = find_classes(materials([-1, 0, 1, 1], data, **section), of_row)
    assert (found.counts, found.lines) == ((1, 1, 2), ())


def test_rows_without_any_label_are_refused(data):
    with refused(DataError, "0 classes", "`-1`", "2 times"):
        find_classes(materials([-1, -1, None], data), of_row)


def test_the_loss_of_several_classes_is_the_formula():
    labels, weights = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), torch.tensor([2.0, 5.0, 0.5])
    p = RESULTS[:2].sigmoid()
    each = -(weights * labels * p.log() + (1 - labels) * (1 - p).log())
    assert multi_label_loss_sum(RESULTS[:2], labels, weights=weights) == pytest.approx(float(each.mean(-1).sum()))


def test_the_loss_of_numbers_is_the_squared_error():
    assert regression_loss_sum(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 0.0]])) == 7.0


@pytest.mark.parametrize("loss_sum", [multi_label_loss_sum, regression_loss_sum])
def test_rows_of_nan_do_not_count_and_give_no_gradient(loss_sum):
    outputs = torch.zeros(2, 2, requires_grad=True)
    loss_sum(outputs, torch.tensor([[1.0, 0.0], [torch.nan, torch.nan]])).backward()
    assert outputs.grad[1].tolist() == [0.0, 0.0]
    assert outputs.grad[0, 0] != 0.0
