"""Evaluation by generation gives the same answers under every strategy, where ranks have unequally many prompts."""

import pytest

GENERATE = "evaluate.generate={num_samples: 3, max_new_tokens: 12, batch_size: 1, show: 3, metrics: [exact_match]}"
PROMPT = "model.peft={type: prompt_tuning, values: {num_virtual_tokens: 3}}"
KINDS = {"full": [], "lora": ["model.lora={rank: 4, alpha: 8}"], "prompt": [PROMPT]}
QUICK = ["train.steps=4", "evaluate.every_steps=2", "checkpoint.every_steps=4", GENERATE]


def answers(run):
    assert run.code == 0, run.output
    found = [event["answer"] for event in run.events("Answered")]
    assert len(found) == 6
    return found


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fsdp2", "lora"),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("zero3", "full"), ("ddp", "prompt"), ("zero3", "prompt"))
        ),
    ],
)
def test_answers_are_those_of_one_process(launch, strategy, kind):
    overrides, name = [*KINDS[kind], *QUICK], f"answers-{strategy}-{kind}"
    alone = answers(launch(None, name=f"{name}-alone", overrides=[*overrides, "train.microbatch_size=4"]))
    assert answers(launch(strategy, name=name, overrides=overrides)) == alone
    assert len(set(alone)) > 1 or kind == "prompt"  # of a random base, which stops at once
