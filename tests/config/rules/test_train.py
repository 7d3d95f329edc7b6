"""Which parameters learn, when, and by which optimizer: what cannot be is said before anything starts."""

import pytest

from finetune.config.rules.train import step_problems
from tests.refusals import pinned

SCHEDULE_FREE = "train.optimizer={name: schedule_free_adamw}"
IN_BACKWARD = "train.optimizer.in_backward=true"
CONSTANT = "train.schedule={name: constant}"

WRONG = [
    ([SCHEDULE_FREE], "train.schedule.name"),
    ([SCHEDULE_FREE, CONSTANT, "train.average={}"], "train.average"),
    (["train.optimizer={name: schedule_free_adamw, betas: [0.0, 0.9]}"], "train.optimizer.betas"),
    (["model.freeze=['a*']", "model.train_only=['b*']"], "model.train_only"),
    (["model.freeze=['a*']", "train.unfreeze=[{patterns: ['b*', 'a*'], after_steps: 1}]"], "train.unfreeze.0.patterns"),
    (["train.unfreeze=[{patterns: ['b*'], after_steps: 100000}]"], "train.unfreeze.0.after_steps"),
    (["train.average={after_steps: 100000}"], "train.average.after_steps"),
    (["train.optimizer.rates={'*': 0.0}"], "train.optimizer.rates.*"),
    (["train.optimizer.fused=true", "train.optimizer.name=sgd"], "train.optimizer.fused"),
    (["train.optimizer={state_dtype: int8, fused: true}"], "train.optimizer.fused"),
    (
        ["train.optimizer.stochastic_rounding=true", "model.dtype=bfloat16", "model.lora={}"],
        "train.optimizer.stochastic_rounding",
    ),
    ([IN_BACKWARD], "train.optimizer.in_backward"),
    ([IN_BACKWARD, "train.microbatch_size=2"], "train.optimizer.in_backward"),
    ([IN_BACKWARD, "train.microbatch_size=auto"], "train.optimizer.in_backward"),
    (["train.microbatch_size=most"], "train.microbatch_size"),
    (["train.try_longest_batch=sometimes"], "train.try_longest_batch"),
    ([IN_BACKWARD, "train.nonfinite.action=skip"], "train.nonfinite.action"),
    ([IN_BACKWARD, "train.precision=fp16"], "train.optimizer.in_backward"),
    (["train.fp8={}"], "train.fp8"),
    (["train.precision=fp8", "model.quantization={}", "model.lora={}"], "train.precision"),
    (["train.precision=fp8", "model.dtype=float16", "model.lora={}"], "train.precision"),
    (["model.gradient_checkpointing=1"], "model.gradient_checkpointing"),
]


@pytest.mark.parametrize(("written", "key"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_invalid_training_settings_are_rejected(problems, written, key):
    found = [problem for problem in problems(*written) if problem.key == key]
    assert found
    for problem in found:
        pinned(problem)


def test_valid_training_settings_are_accepted(problems):
    assert not problems(SCHEDULE_FREE, CONSTANT)
    assert not problems("train.optimizer={name: muon, momentum: 0.9, betas: [0.9, 0.95]}", "train.average={}")
    whole = ("train.microbatch_size=8", "train.global_batch_size=8", "train.max_gradient_norm=null")
    assert not problems(IN_BACKWARD, *whole)
    assert not problems(
        "train.optimizer={stochastic_rounding: true, state_dtype: int8}", "model.dtype=bfloat16", "train.precision=bf16"
    )
    assert not problems("model.gradient_checkpointing=selective")
    assert not problems("train.precision=fp8", "train.fp8={recipe: rowwise}", "model.dtype=bfloat16", "model.lora={}")
    assert not problems("train.unfreeze=[{patterns: ['b*'], after_steps: 1}]", "train.embedding_noise=5.0")


WSD = "name: warmup_stable_decay, decay_fraction: 0.5"
UNFREEZE = "train.unfreeze=[{patterns: ['a*'], after_steps: 2}, {patterns: ['b*'], after_steps: %d}]"
STEPS = [  # what is written, its key, the fewest steps of a run that it fits
    ("train.schedule={warmup_steps: 100}", "train.schedule.warmup_steps", 101),
    (f"train.schedule={{warmup_steps: 5, {WSD}}}", "train.schedule.warmup_steps", 9),
    ("train.average={after_steps: 500}", "train.average.after_steps", 501),
    (UNFREEZE % 500, "train.unfreeze.1.after_steps", 501),
    ("report.profile={start: 7}", "report.profile.start", 7),
    ("train.stop_after_steps=500", None, 1),  # an upper limit: a shorter run keeps it, and is due at its last step
    ("checkpoint={every_steps: 500, keep_every_steps: 1000}", None, 1),
    ("report.log_every_steps=500", None, 1),
    ("train.schedule={warmup_steps: 0}", None, 1),
    ("train.average={after_steps: 0}", None, 1),
]


@pytest.mark.parametrize(("written", "key", "fewest"), STEPS, ids=[row[0] for row in STEPS])
@pytest.mark.parametrize("budget", ["steps", "epochs", "tokens"])
def test_a_key_that_counts_steps_fits_the_run_under_every_budget(load, problems, budget, written, key, fewest):
    """A budget in epochs or tokens has no problem before its number of steps is known, and then the same one."""
    for num_steps in {max(1, fewest - 1), fewest}:
        if budget == "steps":
            found = problems(written, f"train.steps={num_steps}")
        else:
            config = load(written, "train.steps=null", f"train.{budget}=100").config
            found = list(step_problems(config, num_steps=num_steps))
        keys = [problem.key for problem in found if problem.key != "train.unfreeze.0.after_steps"]
        assert keys == ([key] if num_steps < fewest else [])
        assert all(f"the run has {num_steps} steps" in problem.message for problem in found)
