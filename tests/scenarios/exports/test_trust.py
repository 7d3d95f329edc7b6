"""What a run's own record allows, nobody here has allowed: the folder may come from others."""

import json
import shutil

import pytest
from ruamel.yaml import YAML
from transformers import dynamic_module_utils

from finetune.commands.evaluate import evaluate
from finetune.commands.export import export
from finetune.config.load import load_resolved
from finetune.errors import ModelError, UserError

CODE = """
open({canary!r}, "a").write("ran")
from transformers import PreTrainedTokenizerFast
class Tokens(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def given(trained, tmp_path, monkeypatch):
    """A run as somebody else would hand it over: its tokenizer brings code, and its record says to run it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    run = shutil.copytree(trained("full"), tmp_path / "run")
    record = YAML(typ="safe").load(run / "resolved.yaml")
    record["model"]["trust_remote_code"] = True
    (run / "resolved.yaml").write_text(json.dumps(record))  # which is YAML
    for folder in (run / "inputs", run / "final"):
        (folder / "digests.json").unlink(missing_ok=True)  # whoever hands it over can leave them out
        (folder / "evil.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings |= {"auto_map": {"AutoTokenizer": [None, "evil.Tokens"]}, "tokenizer_class": "Evil"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_resolved(run).config.model.trust_remote_code
    return run


def test_a_run_s_record_does_not_let_code_run_and_the_caller_does(given, tmp_path):
    commands = {
        "checkpoint": lambda **says: evaluate(given, step=None, config=None, overrides=(), json=None, **says),
        "final": lambda **says: evaluate(given / "final", step=None, config=None, overrides=(), json=None, **says),
        "export": lambda **says: export(
            given, step=None, to=tmp_path / "out", dtype=None, merge=False, push_to_hub=None, **says
        ),
    }
    for name, command in commands.items():
        with pytest.raises(ModelError, match=r"--trust-remote-code"):
            command()
        assert not (tmp_path / "canary").exists(), name
    for command in commands.values():
        assert command(trust_remote_code=True) in (0, None, tmp_path / "out")
    assert (tmp_path / "canary").exists()


def test_functions_that_only_the_record_of_a_run_names_are_not_called(trained, tmp_path):
    run = shutil.copytree(trained("full"), tmp_path / "run")
    metric = "evaluate.generate={num_samples: 1, max_new_tokens: 2, metrics: ['builtins:exec']}"
    record = YAML(typ="safe").load(run / "resolved.yaml")
    record["evaluate"]["generate"] = {"num_samples": 1, "max_new_tokens": 2, "metrics": ["builtins:exec"]}
    (run / "resolved.yaml").write_text(json.dumps(record))  # which is YAML
    for source in (run, run / "final"):
        with pytest.raises(UserError, match=r"names the Python function `builtins:exec`.*--trust-remote-code"):
            evaluate(source, step=None, config=None, overrides=[], json=None)
    with pytest.raises(UserError, match="builtins:exec"):
        evaluate(run, step=None, config=None, overrides=[metric], json=None)
