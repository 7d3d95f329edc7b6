"""A type of adapter that cannot be trained, or not merged exactly, is one problem with what to write instead."""

import pytest

from tests.refusals import pinned


@pytest.mark.parametrize(
    ("written", "key"),
    [
        (["model.peft={type: lora}"], "model.peft.type"),
        (["model.peft={type: adalora}"], "model.peft.type"),
        (["model.peft={type: cpt}"], "model.peft.type"),
        (["model.peft={type: vera}", "export.merge=true"], "export.merge"),
        (["model.peft={type: prompt_tuning}"], "model.peft.values"),
        (
            ["model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4, prefix_projection: true}}"],
            "model.peft.values.prefix_projection",
        ),
        (["model.peft={type: new_type}", "export.merge=true"], "export.merge"),
        (["model.peft={type: loha, values: {task_type: SEQ_CLS}}"], "model.peft.values.task_type"),
    ],
)
def test_an_adapter_that_is_not_proven_is_refused(problems, written, key):
    (problem,) = problems(*written)
    assert problem.key == key
    pinned(problem)


def test_a_proven_adapter_is_accepted(problems):
    assert problems("model.peft={type: loha, values: {r: 4}}") == []
    assert problems("model.peft={type: lokr}", "export.merge=true") == []
    assert problems("model.peft={type: IA3}") == []
