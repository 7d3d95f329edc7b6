"""Loss and gradients of rows that ranks share, against those of whole rows: FILE DEGREES KIND...

Each group of ranks has rows of its own. Rank 0 writes to FILE, for each kind and degree, the differences of the summed
loss and of the gradient, relative to the largest number of the same parameter's gradient.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from finetune.data.features import Features
from finetune.data.loader import slice_batch
from finetune.runtime.parallel import open_sequence_groups, sequence_group
from finetune.task.lm_loss.target_loss import TargetLoss
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.model_inputs import collate_padding_free
from tests.model.attention.small_models import tiny_model

ROWS = ((11, 3, 17, 2, 8), (3,), (9, 9, 9), (1, 1, 23), (2,))
"""Lengths of the samples of each row, none of which 4 ranks can share evenly but the last but one."""

CHANGED = "checkpointed", "adapted", "keys-of-one"
"""What is done to a Llama model besides: kinds of their own."""


def model_of(kind):
    if kind == "keys-of-one":
        return tiny_model("llama", num_key_value_heads=1)
    if kind not in CHANGED:
        return tiny_model(kind)
    model = tiny_model("llama")
    if kind == "checkpointed":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        return model
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    return adapted.eval()


def row(number):
    chance = np.random.default_rng(number)
    samples = [
        Features({"input_ids": chance.integers(1, 97, each).astype(np.uint32), "is_target": np.arange(each) % 3 != 1})
        for each in ROWS[number]
    ]
    return collate_padding_free(samples)


def gradients(model):
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad and each.grad is not None}


def loss_of(model, batches):
    """Return the summed loss of the batches; gradients are left in the model."""
    total = torch.zeros(())
    for batch in batches:
        loss = TargetLoss(TokenLoss(), "chunked").sums(model, batch)["loss_sum"]
        loss.backward()
        total += loss.detach()
    return total


def compare(kind):
    group, model = sequence_group(), model_of(kind)
    rows = [row(number) for number in range(len(ROWS))]
    own = [each for number, each in enumerate(rows) if number % group.num_groups == group.number]
    wanted = loss_of(model, rows)
    whole = {name: each.clone() for name, each in gradients(model).items()}
    model.zero_grad()
    slices = [slice_batch(each, group) for each in own]
    found = loss_of(model, slices)
    counts = torch.tensor([[each.num_targets, each.num_tokens, len(each.counted_ids)] for each in slices]).sum(dim=0)
    for each in (found, counts):
        dist.all_reduce(each)
    assert counts.tolist() == [*(sum(each.num_targets for each in rows), sum(map(sum, ROWS)), sum(map(len, ROWS)))], (
        counts
    )
    parts = gradients(model)
    farthest = 0.0
    for name, wanted_gradient in whole.items():
        gradient = parts.get(name, torch.zeros_like(wanted_gradient))
        dist.all_reduce(gradient)
        scale = max(float(wanted_gradient.abs().max()), 1e-3)
        farthest = max(farthest, float((gradient - wanted_gradient).abs().max()) / scale)
    assert len(whole) > 2
    return {"loss": abs(float(found / wanted) - 1.0), "gradient": farthest}


def main(file, degrees, kinds):
    dist.init_process_group("gloo")
    found = {}
    for degree in degrees:
        open_sequence_groups(degree)
        for kind in kinds:
            found[f"{kind}/{degree}"] = compare(kind)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")], sys.argv[3:])
