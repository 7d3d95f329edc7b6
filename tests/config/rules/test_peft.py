"""A type of adapter that cannot be trained, or not merged exactly, is one problem with what to write instead."""

import pytest


@pytest.mark.parametrize(
    ("written", "key", "message"),
    [
        (["model.peft={type: lora}"], "model.peft.type", "it has a section of its own: write `model.lora`."),
        (["model.peft={type: adalora}"], "model.peft.type", "its ranks are changed by a call after each step."),
        (["model.peft={type: cpt}"], "model.peft.type", "it trains tokens, keys or routes of its own"),
        (
            ["model.peft={type: vera}", "export.merge=true"],
            "export.merge",
            "that of `ia3`, `oft`, `loha`",
        ),
        (["model.peft={type: prompt_tuning}"], "model.peft.values", "Write `num_virtual_tokens: 16`"),
        (
            ["model.peft={type: prefix_tuning, values: {num_virtual_tokens: 4, prefix_projection: true}}"],
            "model.peft.values.prefix_projection",
            "`prefix_tuning` is trained with `num_virtual_tokens` alone",
        ),
        (["model.peft={type: new_type}", "export.merge=true"], "export.merge", "is not known to be exact"),
        (["model.peft={type: loha, values: {task_type: SEQ_CLS}}"], "model.peft.values.task_type", "it is set by"),
        (["model.peft={type: loha}", "model.lora={}"], "model.peft", "adapters are already configured by `model.lora`"),
    ],
)
def test_an_adapter_that_is_not_proven_is_refused(problems, written, key, message):
    (problem,) = problems(*written)
    assert problem.key == key and message in problem.message


def test_a_proven_adapter_is_accepted(problems):
    assert problems("model.peft={type: loha, values: {r: 4}}") == []
    assert problems("model.peft={type: lokr}", "export.merge=true") == []
    assert problems("model.peft={type: IA3}") == []
