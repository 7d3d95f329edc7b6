"""Faults are injected once, at the specified point, step and rank."""

import errno
import os
import signal

import pytest
import torch

from finetune.errors import UserError
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.heartbeat import INJECTED, VARIABLE, Fault, fault_point, read_faults


def test_the_variable_names_points_steps_ranks_and_actions():
    faults = read_faults("save.rename step=3 rank=1 do=kill; forward do=nan ;")
    assert faults == [Fault("save.rename", "kill", step=3, rank=1), Fault("forward", "nan")]


@pytest.mark.parametrize("written", ["save.renam do=kill", "forward", "forward do=explode", "data do=nan step=x"])
def test_an_invalid_fault_specification_is_rejected_with_the_valid_names(written):
    with pytest.raises(UserError, match=r"is not a valid fault.*save\.rename.*truncate"):
        read_faults(written)


def test_a_fault_point_without_injected_faults_only_updates_the_heartbeat(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    fault_point("forward", step=4)
    assert (heartbeat.last_heartbeat.point, heartbeat.last_heartbeat.step) == ("forward", 4)


def test_a_fault_is_injected_once_at_its_step(monkeypatch):
    monkeypatch.setenv(VARIABLE, "forward step=5 do=nan")
    weight = torch.ones((), requires_grad=True)
    losses = [weight * 2.0 for _ in range(3)]
    for step, loss in zip((4, 5, 5), losses, strict=True):
        fault_point("forward", step=step, tensor=loss)
    assert [loss.isnan().item() for loss in losses] == [False, True, False]
    assert [torch.autograd.grad(loss, weight)[0].isnan().item() for loss in losses] == [False, True, False]


def test_a_fault_of_one_rank_is_not_injected_on_another(monkeypatch):
    monkeypatch.setenv(VARIABLE, "update.before rank=1 do=raise")
    fault_point("update.before", step=1)


def test_injected_errors_and_damage_have_the_specified_effect(monkeypatch, tmp_path):
    path = tmp_path / "00000.safetensors"
    path.write_bytes(b"12345678")
    monkeypatch.setenv(VARIABLE, "save.write do=no_space; save.written part=safetensors do=flip")
    with pytest.raises(OSError) as caught:
        fault_point("save.write", step=1, path=path)
    assert caught.value.errno == errno.ENOSPC
    fault_point("save.written", step=1, path=tmp_path / "index.json")
    assert path.read_bytes() == b"12345678"
    fault_point("save.written", step=1, path=path)
    assert path.read_bytes() == b"12345679"
    monkeypatch.setenv(VARIABLE, "save.done do=truncate")
    fault_point("save.done", step=1, path=path)
    assert path.read_bytes() == b"1234"


def test_every_injected_fault_leaves_a_line_before_it_strikes(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "data do=sleep seconds=0; data do=stop")
    sent = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, number, capsys.readouterr().err)))
    fault_point("data", step=1)
    ((pid, number, said),) = sent
    assert (pid, number) == (os.getpid(), signal.SIGSTOP)
    assert said == f"{INJECTED}: sleep at data\n{INJECTED}: stop at data\n"
