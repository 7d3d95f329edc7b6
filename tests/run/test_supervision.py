import importlib.util

import pytest
import torch

from finetune.errors import ModelError
from finetune.run.supervision import model_code_errors
from tests.refusals import refused

CODE = """
import torch
def forward(inner=None):
    if inner is not None:
        return inner()
    raise ValueError("Each example must contain at least one <eos> token.")
def short():
    return torch.zeros(2, 3) @ torch.zeros(2, 3)
"""


@pytest.fixture
def model_code(tmp_path):
    path = tmp_path / "transformers" / "models" / "t5" / "modeling_t5.py"
    path.parent.mkdir(parents=True)
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("modeling_t5", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_error_raised_by_model_code_is_one_message_with_its_line(model_code):
    with (
        refused(ModelError, "ValueError", "modeling_t5.py, line 6"),
        model_code_errors(),
    ):
        model_code.forward()
    with refused(ModelError, "RuntimeError", "line 8"), model_code_errors():
        model_code.short()


def test_our_errors_and_out_of_memory_errors_inside_the_model_are_not_wrapped(model_code, tmp_path):
    ours = tmp_path / "finetune" / "attention.py"
    ours.parent.mkdir()
    scope = {}
    exec(compile("def inner(): raise KeyError('ours')", str(ours), "exec"), scope)
    with pytest.raises(KeyError, match="ours"), model_code_errors():
        model_code.forward(scope["inner"])
    with pytest.raises(torch.OutOfMemoryError), model_code_errors():
        raise torch.OutOfMemoryError
