"""DDP's gradient buckets, settled as the run that is continued had settled them.

DDP regroups its buckets once, by the order in which the first backward pass has made the gradients. Above two ranks the
sum over ranks is rounded by a number's place in its bucket, so without this a continued run's first step would differ
in the last bit from the same step of the run that was never stopped.
"""

from collections.abc import Callable

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(accelerator: Accelerator, model: nn.Module, *, loss: Callable[[], Tensor]) -> None:
    """Have DDP regroup now, by two backward passes whose gradients are thrown away; any other model is left alone.

    Call it before the state is loaded, which brings back what a forward pass changes (the statistics of norms), and
    only where at least one step has been taken: the first step of all has the first buckets. Collective.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    for _ in range(2):  # the second forward pass regroups
        accelerator.backward(loss())
    for parameter in model.parameters():
        parameter.grad = None
