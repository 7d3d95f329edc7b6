"""The gloo bridge replaces one private function of Accelerate; these fail loudly when Accelerate changes it."""

import inspect

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from finetune.strategy.cpu import gloo_bridge


def test_the_function_that_is_replaced_still_answers_backend_and_type():
    parameters = list(inspect.signature(PartialState._prepare_backend).parameters)
    assert parameters == ["self", "cpu", "sagemaker_dp", "backend"]
    assert "self._prepare_backend(" in inspect.getsource(PartialState.__init__)


def test_the_bridge_answers_gloo_only_while_it_stands(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "")
    monkeypatch.setenv("DS_ACCELERATOR", "")
    before = PartialState._prepare_backend
    with gloo_bridge():
        assert PartialState._prepare_backend(None, False) == ("gloo", DistributedType.MULTI_GPU)
    assert PartialState._prepare_backend is before
