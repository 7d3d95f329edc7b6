"""A model beside the trained one is loaded as if no strategy were there, and the strategy is there again behind it."""

import os
from types import SimpleNamespace

import pytest

from finetune.strategy.apart import held_whole

FLAG = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def test_ranks_that_are_sent_their_weights_load_a_second_model_whole(monkeypatch):
    monkeypatch.setenv(FLAG, "true")
    with held_whole(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None))):
        assert FLAG not in os.environ
    assert os.environ[FLAG] == "true"


def test_zero_3_is_switched_on_again_even_after_an_error(monkeypatch):
    monkeypatch.delenv(FLAG, raising=False)
    calls = []
    plugin = SimpleNamespace(set_deepspeed_weakref=lambda: calls.append("on"))
    monkeypatch.setattr("finetune.strategy.apart.unset_hf_deepspeed_config", lambda: calls.append("off"))
    with pytest.raises(OSError), held_whole(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))):
        assert calls == ["off"]
        raise OSError
    assert calls == ["off", "on"]
    assert FLAG not in os.environ
