"""Models are loaded by one module, without remote code and pickles; no other module reads files that can run code."""

import ast
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, dynamic_module_utils

from finetune.errors import ModelError
from finetune.model.loading.hub import loading_errors, read_json_settings
from finetune.model.loading.pretrained import load_auto_class
from finetune.model.loading.saved import inspect_model_folder, load_saved_base
from finetune.model.upstream import data_only_loading, loading_patches
from tests.refusals import refused

PACKAGE = Path(__file__).parents[3] / "finetune"
ONE_PLACE = "model/loading/pretrained.py"
VERIFIER = "export/verify/program.py"
"""Loads what this package has just written, safetensors alone, in a process that must share none of its code."""

OWN_PICKLES = {
    "data/streams/windows.py": "its standard input, an unnamed file that its own parent has written",
    "run/session/engine.py": "a call that rank 0 of the same run has sent",
    "data/token_cache/chunks.py": "the arguments of a worker process, which its own parent has sent",
}
"""Files that read a pickle, and whose: only what this very program has just written, never what lies on a disk."""

UNPICKLE = ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "joblib.load", "dill.load")


def loads(path):
    """Yield line and text of every expression in the file that loads a model or possibly a pickle."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        if text.endswith(".from_pretrained") or text in UNPICKLE:
            yield node.lineno, text
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            allows = [ast.unparse(each.value) for each in node.keywords if each.arg == "allow_pickle"]
            if node.func.attr == "from_config" or (ast.unparse(node.func) == "np.load" and allows != ["False"]):
                yield node.lineno, ast.unparse(node.func)


def test_models_and_pickles_are_loaded_only_by_the_pretrained_module():
    files = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    assert len(files) > 200
    found = {name: list(loads(path)) for name, path in files.items()}
    assert len(found.pop(ONE_PLACE)) >= 5
    assert {each.rpartition(".")[2] for _, each in found.pop(VERIFIER)} == {"from_pretrained"}
    for name in OWN_PICKLES:
        assert {each for _, each in found.pop(name)} <= {"pickle.load", "pickle.loads"}
    lines = [f"finetune/{name}:{line}: {text}" for name, each in found.items() for line, text in each]
    assert not lines, f"load it through finetune/{ONE_PLACE}, or as arrays without pickles:\n" + "\n".join(lines)


def test_every_patched_loading_function_exists_in_the_installed_transformers():
    doors = [(owner, name) for owner, name, _ in loading_patches(trust_remote_code=False)]
    assert len(doors) == 8 and all(hasattr(owner, name) for owner, name in doors)
    assert len(list(loading_patches(trust_remote_code=True))) == 5


def test_transformers_never_prompts_for_trust_in_remote_code(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    with pytest.raises(ValueError, match="trust_remote_code"):
        dynamic_module_utils.resolve_trust_remote_code(None, "evil", has_local_code=False, has_remote_code=True)


def test_loading_functions_are_restricted_only_inside_the_context(tmp_path):
    (tmp_path / "evil.py").write_text("")
    torch.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    with data_only_loading(trust_remote_code=False):
        with refused(ModelError, "model.trust_remote_code"):
            dynamic_module_utils.get_class_from_dynamic_module("evil.A", str(tmp_path), local_files_only=True)
        with refused(ModelError, "pickles"):
            torch.load(tmp_path / "a.bin")
        with refused(ModelError, "pickles"):
            torch.load(tmp_path / "a.bin", weights_only=False)
    with data_only_loading(trust_remote_code=True):
        assert torch.load(tmp_path / "a.bin")["a"] == 1
    assert torch.load(tmp_path / "a.bin")["a"] == 1


def test_an_adapter_in_the_folder_of_a_full_model_is_rejected_even_if_trusted(tmp_path):
    config = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=1, **config)).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "other"}))
    for trusts in (False, True):
        with data_only_loading(trust_remote_code=trusts), refused(ModelError):
            LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_tokenizer_class_that_is_not_a_tokenizer_is_rejected(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "RagRetriever"}')
    with refused(ModelError, "'RagRetriever'", "PreTrainedTokenizerBase"):
        load_auto_class(AutoTokenizer, tmp_path, trust_remote_code=False)


def test_a_panic_of_rust_becomes_an_error_and_ctrl_c_stays():
    panic = type("PanicException", (BaseException,), {})
    with (
        refused(ModelError, "k: ", "`./folder`", "index out of bounds"),
        loading_errors("./folder", key="k"),
    ):
        raise panic("index out of bounds")
    with pytest.raises(KeyboardInterrupt), loading_errors("./folder", key="k"):
        raise KeyboardInterrupt


def test_settings_files_are_one_object_of_limited_depth(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": {"b": [1, "ü", {"c": null}]}}')
    assert read_json_settings(path) == {"a": {"b": [1, "ü", {"c": None}]}}
    path.write_text('{"a": ' + "[" * 63 + "]" * 63 + "}")
    assert len(read_json_settings(path)) == 1
    path.write_text('{"a": ' + "[" * 64 + "]" * 64 + "}")
    with refused(ModelError, "config.json", "64 deep"):
        read_json_settings(path)


def test_heads_beyond_the_weights_are_refused_before_a_model_is_built(tmp_path, monkeypatch):
    """`num_key_value_heads: 1000000` took 2.4 GB until the shapes were compared."""
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    (tmp_path / "model.safetensors").write_bytes(bytes(200_000))
    config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": 1_000_000}
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)
    saved = inspect_model_folder(tmp_path, key="chat")
    with refused(ModelError, "config.json", "`num_key_value_heads` 1,000,000"):
        load_saved_base(saved, key="chat")
