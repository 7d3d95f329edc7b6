"""No microbatch copies from the host what the device could keep: such copies are counted.

A tensor that is made of Python numbers on a device is copied there from pageable memory, and the host waits for it. The
CPU form takes the meta device for the one that is not the host.
"""

import pickle
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from finetune.data.batch import Batch
from finetune.data.encoding.labelled import Classes
from finetune.task.classes import WeightedClasses
from finetune.task.classification import (
    ImageClassificationTask,
    TextClassificationTask,
    TokenClassificationTask,
)
from tests.devices import EVERY_DEVICE
from tests.train.test_syncs import second_step

WEIGHTED = WeightedClasses(Classes(("a", "b", "c")), (0.5, 1.0, 2.0))
SMOOTHED = {"classification": WEIGHTED, "label_smoothing": 0.1}
TASKS = {
    "text": (TextClassificationTask, {**SMOOTHED, "kind": "single_label"}, (4,)),
    "several": (TextClassificationTask, {**SMOOTHED, "kind": "multi_label"}, (4, 3)),
    "tokens": (TokenClassificationTask, SMOOTHED, (4, 7)),
    "images": (ImageClassificationTask, SMOOTHED, (4,)),
}

MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


class HostCopies(TorchFunctionMode):
    """Counts calls that make tensors of Python numbers, and those that copy from the host to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_seen = 0

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        result = function(*given, **(named or {}))
        self.num_seen += 1
        if function in MADE_OF_NUMBERS or ("cpu" in _devices((given, named)) and _devices(result) - {"cpu"}):
            self.found[function.__name__] += 1
        return result


def _devices(values: Any) -> set[str]:
    return {each.device.type for each in tree_leaves(values) if isinstance(each, Tensor)}


@EVERY_DEVICE
@pytest.mark.parametrize("name", TASKS)
def test_class_weights_are_copied_to_the_device_once(device, name):
    kind, parts, shape = TASKS[name]
    task = object.__new__(kind)
    task.__dict__.update(pickle.loads(pickle.dumps(parts)))  # as new: nothing is on a device yet
    elsewhere = torch.device("meta" if device == "cpu" else device)
    batch = _batch(shape, elsewhere, is_several=name == "several")
    weight = torch.zeros(3, device=elsewhere, requires_grad=True)
    model = partial(_model, weight, shape if name == "tokens" else shape[:1])
    found = []
    for _ in range(3):
        with HostCopies() as copies:
            task.loss_sums(model, batch)["loss_sum"].backward()
        assert copies.num_seen > 5
        found.append(copies.found.total())
    assert found == [1, 0, 0]


def test_device_copies_of_class_weights_are_not_pickled_for_loader_workers():
    weights = WEIGHTED.weight_tensor(torch.device("cpu"))
    assert weights is WEIGHTED.weight_tensor(torch.device("cpu"))
    assert weights.tolist() == [0.5, 1.0, 2.0]
    sent = pickle.loads(pickle.dumps(WEIGHTED))
    assert sent == WEIGHTED and sent._on_device == {}


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("lora", [False, True])
def test_a_step_of_a_language_model_copies_nothing(lora, num_batches):
    take = second_step(Accelerator(cpu=True), lora=lora, num_batches=num_batches)
    with HostCopies() as copies:
        take()
    assert copies.num_seen > 50
    assert copies.found == {}


def _batch(shape, device, *, is_several):
    labels = torch.zeros(shape, device=device, dtype=torch.float32 if is_several else torch.int64)
    inputs = {"pixel_values": torch.zeros(4, 1, 2, 2, device=device)}
    return Batch(inputs=inputs, labels=labels, num_targets=4, num_tokens=4, sample_ids=(0, 1, 2, 3))


def _model(weight, shape, **_):
    return SimpleNamespace(logits=weight.expand(*shape, 3) * 2)
