"""What the routers add to a step makes no host wait for its device."""

import torch

from finetune.data.batch import Batch
from finetune.task.router_loss.loss import RoutedTask, RoutingRecorder
from finetune.task.router_loss.routers import find_routers
from tests.task.router_loss.mixtures import VOCABULARY, mixture
from tests.train.test_syncs import waits_of


class Replayed:
    """A task whose forward pass is over: only what the routers returned comes again."""

    def __init__(self, model, recorder):
        self._recorder, self._before = recorder, []
        ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids).tril(6)
        with recorder.recording() as routings:
            loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum()
        self._sums, self._routings = {"loss_sum": loss}, list(routings)
        self.batch = Batch({"input_ids": ids}, ids, num_targets=16, num_tokens=16, sample_ids=(0, 1))

    def prepare_step(self, model, batches):
        return batches

    def loss_sums(self, model, batch):
        self._recorder._routings.extend(self._routings)
        return self._sums


def test_counts_totals_and_the_loss_stay_on_the_device():
    model = mixture("mixtral")
    recorder = RoutingRecorder(model, find_routers(model))
    replayed = Replayed(model, recorder)
    routed = RoutedTask(replayed, recorder, 0.1, lambda batch: None)

    def step():
        for batch in routed.prepare_step(model, [replayed.batch] * 2):
            routed.loss_sums(model, batch)

    step()
    seen, found = waits_of(step)
    assert sum(event.name == "aten::scatter_add_" for event in seen.events()) >= 4
    assert not found
