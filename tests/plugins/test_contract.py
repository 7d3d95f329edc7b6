"""What a plugin returns against its contract is one message that names it, on one process and on several."""

import json
import sys

import pytest

from tests.launching import accelerate_command, capture
from tests.small_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

HEAD = "import os, sys\nimport torch\nfrom finetune import register\n"
LOSS = '@register.loss("mine")\ndef mine(log_probabilities, labels, batch):\n    '
SCHEDULE = '@register.schedule("mine")\ndef mine(schedule, steps_done):\n    '
OPTIMIZER = (
    "class Own(torch.optim.SGD):\n    pass\n\n"
    'STATE = (register.OptimizerState(class_name="Own", keys=("momentum_buffer",)),)\n'
    '@register.optimizer("mine", states=STATE, num_moments=1)\ndef mine(inputs):\n    '
)
SOURCE = (
    'TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]\n'
    '@register.source("mine")\ndef mine():\n    '
)
CALLBACK = '@register.callback("mine")\nclass Mine:\n    def __call__(self, event):\n        '

OF = {
    LOSS: ("task.loss=mine",),
    SCHEDULE: ("train.schedule={name: mine}",),
    OPTIMIZER: ("train.optimizer={name: mine}",),
    SOURCE: ("data.train={source: mine, format: messages}",),
    CALLBACK: ("train.callbacks=[mine]",),
}

REFUSED = {
    "a detached loss": (LOSS, "return -log_probabilities.detach()", "no gradient reaches the model"),
    "a loss of other numbers": (
        *(LOSS, "return torch.ones(len(labels), requires_grad=True) * 2", "no gradient reaches the model"),
    ),
    "a loss elsewhere": (LOSS, 'return torch.zeros(len(labels), device="meta")', "a tensor on meta, not on cpu"),
    "no factor": (SCHEDULE, "return None", "the schedule `mine` of the plugin"),
    "a factor below 0": (SCHEDULE, "return -0.5 if steps_done == 6 else 1.0", "`-0.5` of type `float`"),
    "a factor that is infinite": (SCHEDULE, "return float('inf')", "`inf` of type `float`"),
    "no optimizer": (OPTIMIZER, "return None", "the optimizer `mine` of the plugin"),
    "an optimizer class": (OPTIMIZER, "return Own", "torch.optim.Optimizer"),
    "an optimizer of a part of the weights": (
        OPTIMIZER,
        'first = inputs.groups[0]\n    return Own([{**first, "params": first["params"][:-3]}], lr=1e-3)',
        "an optimizer with 3 of ",
    ),
    "an optimizer without its groups' keys": (
        OPTIMIZER,
        'return Own([each for group in inputs.groups for each in group["params"]], lr=1e-3)',
        "whose groups lack",
    ),
    "an array in a row": (
        *(SOURCE, 'import numpy\n    return [{"messages": numpy.array(TURNS)}]', "`messages` has a `numpy.ndarray`"),
    ),
    "a deep row": (
        SOURCE,
        "deep = []\n    for _ in range(5000):\n        deep = [deep]\n    return [{'messages': TURNS, 'x': deep}]",
        "more than 100 levels deep",
    ),
}


@pytest.fixture
def train(tmp_path):
    """Return a function that trains a job with the plugin of this code and returns the finished process."""

    def run(head, body, *overrides, strategy=None):
        job = write_job(tmp_path)
        (tmp_path / "mine.py").write_text(HEAD + head + body + "\n")
        words = ["--config", str(job), "--set", "plugins=[./mine.py]"]
        words += [word for override in (*OF[head], *overrides) for word in ("--set", override)]
        if strategy is not None:
            return capture(accelerate_command(strategy, "-m", "finetune", *words), timeout_seconds=600)
        return capture([sys.executable, "-m", "finetune", *words], timeout_seconds=600)

    return run


@pytest.mark.parametrize(("head", "body", "message"), REFUSED.values(), ids=REFUSED)
def test_a_plugin_that_breaks_its_contract_is_refused_with_one_message(train, head, body, message):
    done = train(head, body)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("head", [LOSS, SCHEDULE, SOURCE, OPTIMIZER], ids=["loss", "schedule", "source", "optimizer"])
def test_a_plugin_that_exits_with_0_fails_the_run_with_its_line(train, tmp_path, head):
    done = train(head, "sys.exit(0)")
    assert done.returncode == 1
    assert f"{tmp_path}/mine.py, line" in done.stderr and "exit code 0" in done.stderr
    assert not (tmp_path / "runs/job/final").exists()


def test_a_callback_that_exits_is_disabled_with_a_warning_and_the_run_finishes(train, tmp_path):
    done = train(CALLBACK, "sys.exit(0)")
    assert done.returncode == 0, done.stderr
    assert "callback `mine` failed and is disabled: SystemExit: 0" in done.stdout + done.stderr
    assert (tmp_path / "runs/job/final/config.json").is_file()


def test_ranks_that_end_without_an_error_before_the_run_does_are_a_failure(train, tmp_path):
    write_job(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + LOSS + "os._exit(0)\n")
    words = [sys.executable, "-m", "finetune", "train", "--config", str(tmp_path / "job.yaml"), "--processes", "2"]
    words += ["--set", "plugins=[./mine.py]", "--set", "task.loss=mine"]
    done = capture(words, timeout_seconds=600)
    assert done.returncode == 1
    assert "ended with exit code 0 before the run did" in done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("head", "body", "title"),
    [
        (SCHEDULE, 'return 1.0 if os.environ["RANK"] == "0" else 0.5', "learning rates on rank 1"),
        (SOURCE, 'return [{"messages": TURNS}] * (50 if os.environ["RANK"] == "0" else 60)', "rows on rank 1"),
        (
            OPTIMIZER,
            'return Own(inputs.groups, lr=1e-3, momentum=float(os.environ["RANK"]) / 2)',
            "the settings of the optimizer on rank 1",
        ),
    ],
    ids=["schedule", "source", "optimizer"],
)
def test_a_plugin_that_differs_between_ranks_is_refused_before_the_first_step(train, tmp_path, head, body, title):
    done = train(head, body, strategy="ddp")
    assert done.returncode != 0
    assert title in done.stderr and "differ from rank 0's" in done.stderr and "mine" in done.stderr
    status = json.loads((tmp_path / "runs/job/status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 2, 0)
    assert not list(tmp_path.glob("runs/job/checkpoints/*"))
