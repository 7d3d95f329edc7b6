"""One step of `embedding` on 1, 2 and 4 processes, in microbatches of 4 to 64: one loss and one gradient.

The step is taken by SGD with a learning rate of 1, so that the change of the weights is the gradient.
"""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.task_cases.case import Case
from tests.task_cases.classification import BERT, job
from tests.task_cases.embedding import PAIRS, write
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(1800)]

BATCH = 64
TRAIN = f"""train:
  {{global_batch_size: {BATCH}, microbatch_size: 4, steps: 1, learning_rate: 1.0, max_gradient_norm: null,
   optimizer: {{name: sgd, momentum: 0.0}}, schedule: {{name: constant}}}}"""
CASE = Case(
    "embedding_step",
    job("step", BERT, PAIRS).replace(
        "train: {global_batch_size: 8, microbatch_size: 2, steps: 4, learning_rate: 1e-2}", TRAIN
    ),
    partial(write, kind="pairs", num_rows=BATCH),
    "loss",
    lambda final, folder: 0.0,
    {f"micro{size}": (f"train.microbatch_size={size}",) for size in (4, 8, 16, 32, 64)},
)
SPREAD = [(name, world) for name in ("ddp", "fsdp2", "zero2", "zero3") for world in (2, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("step")
    prepare([CASE], place)
    return place


def weights(left):
    return load_file(left.final / "model.safetensors")


@pytest.fixture(scope="module")
def alone(folder):
    return launch(None, [(CASE, variant) for variant in CASE.variants], folder)


def compare(left, whole, before):
    """Return how far the loss is from that of one microbatch on one process, and the gradient relative to its size."""
    assert left.error is None
    (loss,), (expected,) = left.losses, whole.losses
    found, wanted = weights(left), weights(whole)
    gradient = torch.cat([(wanted[name] - before[name]).flatten() for name in sorted(wanted)])
    other = torch.cat([(found[name] - before[name]).flatten() for name in sorted(wanted)])
    assert gradient.norm() > 0.1
    return abs(loss / expected - 1), ((other - gradient).norm() / gradient.norm()).item()


@pytest.fixture(scope="module")
def before(folder):
    """The weights before the step: those of a run whose learning rate is next to nothing."""
    case = Case(
        "embedding_step", CASE.job, CASE.prepare, "loss", CASE.reload, {"still": ("train.learning_rate=1e-30",)}
    )
    return weights(launch(None, [(case, "still")], folder, name="before")[case.name, "still"])


def test_on_one_process_every_microbatch_gives_the_same_step(alone, before):
    whole = alone[CASE.name, "micro64"]
    for variant in CASE.variants:
        loss, gradient = compare(alone[CASE.name, variant], whole, before)
        print(f"single x 1, {variant}: loss {loss:.1e}, gradient {gradient:.1e}")
        assert loss < 1e-5
        assert gradient < 1e-4


@pytest.mark.parametrize(("strategy", "world"), SPREAD)
def test_on_several_processes_every_strategy_gives_the_same_step(alone, before, folder, strategy, world):
    fitting = [(CASE, variant) for variant in CASE.variants if int(variant.removeprefix("micro")) * world <= BATCH]
    assert len(fitting) >= 3
    spread = launch(strategy, fitting, folder, name=f"{strategy}-{world}", processes=world)
    for _, variant in fitting:
        loss, gradient = compare(spread[CASE.name, variant], alone[CASE.name, "micro64"], before)
        print(f"{strategy} x {world}, {variant}: loss {loss:.1e}, gradient {gradient:.1e}")
        assert loss < 1e-5
        assert gradient < 1e-4
