"""The memory of a step on rows that 4 ranks share, 4 times as long, against that of whole rows: FILE.

Writes the peak of the tensors of a forward and a backward pass, gradients included, of rank 0 alone with a row, and the
largest of 4 ranks with a row of 4 times its length.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from finetune.data.features import Features
from finetune.data.loader import slice_batch
from finetune.runtime import distributed
from finetune.runtime.parallel import open_sequence_groups, sequence_group
from finetune.task.lm_loss.target_loss import TargetLoss
from finetune.task.lm_loss.token_loss import TokenLoss
from finetune.task.model_inputs import collate_padding_free
from tests.live_bytes import peak_memory
from tests.model.attention.small_models import tiny_model

LENGTH, DEGREE = 512, 4
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8}
CASES = {
    "llama checkpointed": {"num_key_value_heads": 4, "head_dim": 16},
    "gpt_oss": {"num_key_value_heads": 4, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


def model_of(name):
    model = tiny_model(name.split()[0], **{**SIZES, "max_position_embeddings": 8192, **CASES[name]})
    if "checkpointed" in name:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return model


def row(length):
    ids = np.random.default_rng(0).integers(1, 97, length).astype(np.uint32)
    return collate_padding_free([Features({"input_ids": ids, "is_target": np.ones(length, bool)})])


def peak_of_step(model, batch):
    model.zero_grad()
    with peak_memory("cpu") as memory:
        TargetLoss(TokenLoss(), "chunked").sums(model, batch)["loss_sum"].backward()
    return memory.peak


def main(file):
    dist.init_process_group("gloo")
    open_sequence_groups(DEGREE)
    found = {}
    for name in CASES:
        model = model_of(name)
        alone = peak_of_step(model, row(LENGTH))
        shared = peak_of_step(model, slice_batch(row(LENGTH * DEGREE), sequence_group()))
        found[name] = {"alone": alone, "shared": max(distributed.gather_objects(shared))}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
