"""Evaluation by generation gives the same answers under every strategy, where ranks have unequally many prompts."""

import pytest

GENERATE = "evaluate.generate={num_samples: 3, max_new_tokens: 12, batch_size: 1, show: 3, metrics: [exact_match]}"
KINDS = {"full": [], "lora": ["model.lora={rank: 4, alpha: 8}"], "prompt": ["model.prompt_tuning={num_tokens: 3}"]}
QUICK = ["train.steps=4", "evaluate.every_steps=2", "checkpoint.every_steps=4", GENERATE]


def answers(run):
    assert run.code == 0, run.output
    found = [event["answer"] for event in run.events("Answered")]
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def alone(launch):
    """The answers of one process."""
    return {
        kind: answers(launch(None, name=f"answers-{kind}", overrides=[*settings, *QUICK, "train.microbatch_size=4"]))
        for kind, settings in KINDS.items()
    }


SHORT = [("fsdp2", "lora"), ("zero3", "full")]
OTHERS = [(strategy, kind) for strategy in ("ddp", "fsdp1", "fsdp2", "zero3") for kind in KINDS]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*SHORT, *(pytest.param(*each, marks=pytest.mark.full) for each in OTHERS if each not in SHORT)],
)
def test_answers_are_those_of_one_process(launch, alone, strategy, kind):
    run = launch(strategy, name=f"answers-{strategy}-{kind}", overrides=[*KINDS[kind], *QUICK])
    assert answers(run) == alone[kind]
    assert len(set(alone[kind])) > 1 or kind == "prompt"  # of a random base, which stops at once
