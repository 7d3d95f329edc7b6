"""lm-eval is handed the exported model, and what it finds is printed and kept; the package here is a stand-in."""

import json
import sys
from types import SimpleNamespace

import pytest

from finetune.commands.evaluate import evaluate_with_harness
from finetune.errors import MissingPackage, UserError

FOUND = {"results": {"hellaswag": {"alias": "hellaswag", "acc,none": 0.25, "acc_stderr,none": 0.01}}, "n-shot": {}}


@pytest.fixture
def asked(monkeypatch):
    """Put the stand-in where the package would be; return what it is asked."""
    calls = []
    stand_in = SimpleNamespace(simple_evaluate=lambda **keys: calls.append(keys) or FOUND)
    monkeypatch.setitem(sys.modules, "lm_eval", stand_in)
    return calls


def test_a_checkpoint_is_exported_and_measured(trained, asked, tmp_path, capsys):
    evaluate_with_harness(trained("full"), step=2, tasks="hellaswag, arc_easy", json=tmp_path / "found.json")
    (call,) = asked
    assert (call["model"], call["tasks"]) == ("hf", ["hellaswag", "arc_easy"])
    assert call["model_args"]["pretrained"].endswith("/model")
    assert json.loads((tmp_path / "found.json").read_text()) == FOUND
    assert "hellaswag                       acc,none                    0.25\n" in capsys.readouterr().out


def test_the_harness_gets_an_adapter_and_its_base(trained, asked):
    final = trained("lora") / "final"
    evaluate_with_harness(final, step=None, tasks="hellaswag", json=None)
    arguments = {"pretrained": str(final / "base"), "tokenizer": str(final), "trust_remote_code": False}
    assert asked[0]["model_args"] == {**arguments, "peft": str(final)}


def test_missing_packages_and_unsupported_launches_of_the_harness_are_reported(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackage, match=r"pip install 'finetune-accelerate\[lm-eval\]'"):
        evaluate_with_harness(trained("full"), step=None, tasks="hellaswag", json=None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="run it in one process"):
        evaluate_with_harness(trained("full"), step=None, tasks="hellaswag", json=None)
