"""A state of tensors of every type that ranks hold parts of, cut anywhere: no strategy, and no model."""

import torch

from finetune.checkpoint.sharding.access import LossScale, StateAccess
from finetune.checkpoint.sharding.state_layout import ShardView, StateLayout
from finetune.runtime import distributed

SHAPES = {"wide": (37, 5), "long": (1001,), "tiny": (1,), "table": (64, 64), "flat": (3, 0, 2)}


class Parted:
    """Parameters and AdamW's moments; rank r of n holds its run of each flattened tensor, the last rank the least."""

    def __init__(self, *, step: int = 0, copies: bool = False) -> None:
        """With `copies`, the upper half of the ranks hold what the lower half holds, as HSDP's do."""
        rank, world = distributed.rank(), distributed.world()
        num_parts = world // 2 if copies else world
        self.held, self.whole, state = {}, {}, {}
        for number, (name, shape) in enumerate(SHAPES.items()):
            generator = torch.Generator().manual_seed(1000 * number + step)
            total = torch.randn(shape, generator=generator).reshape(-1)
            start, stop = _span(total.numel(), rank % num_parts, num_parts)
            owner = torch.nn.Parameter(total[start:stop].clone())
            self.held[name] = ShardView(
                tensor=owner,
                local_view=lambda tensor: tensor.detach().reshape(-1),
                shape=shape,
                start=start,
                stop=stop,
                is_trained=True,
                is_replicated=False,
                is_copy=rank >= num_parts,
            )
            self.whole[name] = total
            moments = {"exp_avg": total * 2, "exp_avg_sq": (total * total).to(torch.bfloat16)}
            self.whole |= {f"{name}/{key}": value for key, value in moments.items()}
            state[owner] = {key: value[start:stop].clone() for key, value in moments.items()}
            state[owner]["step"] = torch.tensor(float(step))
        optimizer = torch.optim.AdamW([held.tensor for held in self.held.values()])
        optimizer.state.update(state)
        self.access = StateAccess(
            StateLayout(shards=self.held),
            optimizer,
            device=torch.device("cpu"),
            loss_scale=LossScale(scaler=None, deepspeed=None),
        )


def _span(count: int, rank: int, num_parts: int) -> tuple[int, int]:
    size = -(-count // num_parts)
    return min(rank * size, count), min((rank + 1) * size, count)
