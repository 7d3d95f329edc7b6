"""The record of layer outputs is of the tokens alone, however they are divided, and of the first steps alone."""

import pytest
import torch
from torch import nn

from finetune.data.batch import Batch
from finetune.train.layer_outputs import RecordedTask, take_layer_outputs


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(self.embed(input_ids))


class SumTask:
    def prepare_step(self, model, batches):
        return batches

    def loss_sums(self, model, batch):
        return {"loss_sum": model(**batch.inputs).sum()}

    def step_metrics(self, sums, *, num_targets):
        return {"names": float(len(sums))}


ROWS = ([1, 2, 3], [4, 5], [6])


def batch_of(*rows: list[int]) -> Batch:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [7] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    inputs = {"input_ids": ids, "attention_mask": mask}
    return Batch(inputs=inputs, labels=ids, num_targets=1, num_tokens=1, sample_ids=(0,))


def recorded(model: Model, *batches: Batch, stops: bool = False) -> dict[str, dict[str, float]]:
    task = RecordedTask(SumTask(), model, {"embed": model.embed, "norm": model.norm})
    if stops:
        task.stop()
    sums = [task.loss_sums(model, batch) for batch in batches]
    model(**batches[0].inputs)  # outside of a step: recomputation, an evaluation
    totals = {name: sum(each[name] for each in sums) for name in sums[0]}
    named = {name: value.tolist() for name, value in totals.items()}
    layers = take_layer_outputs(named)
    assert list(named) == ["loss_sum"], "the task's own sums are left"
    assert task.step_metrics(named, num_targets=1) == {"names": 1.0}
    return layers


def test_padding_and_the_division_into_microbatches_change_no_norm():
    model = Model()
    whole, divided = recorded(model, batch_of(*ROWS)), recorded(model, *(batch_of(row) for row in ROWS))
    expected = model.embed.weight[1:7].detach()  # the tokens 1 to 6, without the padding, 7
    assert whole["embed"]["positions"] == divided["embed"]["positions"] == 6.0
    assert whole["embed"]["norm"] == pytest.approx(float(expected.norm()))
    for name in ("embed", "norm"):
        for norm in ("norm", "projected_norm"):
            assert whole[name][norm] == pytest.approx(divided[name][norm])


def test_one_bit_changes_the_checksum_of_what_follows():
    model = Model()
    before = recorded(model, batch_of(*ROWS))
    with torch.no_grad():
        model.norm.weight.view(torch.int32)[2] += 1
    after = recorded(model, batch_of(*ROWS))
    assert before["embed"] == after["embed"]
    assert before["norm"]["checksum"] != after["norm"]["checksum"]
    assert before["norm"]["norm"] == pytest.approx(after["norm"]["norm"])


def test_a_layer_norm_that_reads_other_values_has_another_projected_norm():
    model = Model()
    before = recorded(model, batch_of(*ROWS))
    with torch.no_grad():
        model.embed.weight += torch.randn(8, 6) * 0.1
    after = recorded(model, batch_of(*ROWS))
    assert after["norm"]["norm"] == pytest.approx(before["norm"]["norm"], rel=1e-4), "it normalizes"
    assert after["norm"]["projected_norm"] != pytest.approx(before["norm"]["projected_norm"], rel=1e-3)


def test_nothing_is_recorded_after_the_first_steps():
    assert recorded(Model(), batch_of(*ROWS), stops=True) == {}


def test_outputs_of_16_bits_have_a_checksum_too():
    model = Model().to(torch.bfloat16)
    one, other = recorded(model, batch_of(*ROWS)), recorded(model, batch_of(ROWS[1], ROWS[0], ROWS[2]))
    assert one["embed"]["checksum"] != other["embed"]["checksum"], "the same rows in another order"
    assert one["embed"]["norm"] == pytest.approx(other["embed"]["norm"])
