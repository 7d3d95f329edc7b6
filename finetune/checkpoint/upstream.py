"""Every workaround that checkpoints need for DeepSpeed.

Each names the source line upstream. `CHECKED_WITH` has the newest versions with which each was found necessary and
right; a test fails with a newer version, and one for each workaround when it is no longer needed.
"""

from collections.abc import Mapping
from typing import Any

import torch

CHECKED_WITH: Mapping[str, str] = {"deepspeed": "0.19"}


def step_zero3_partitions(zero: Any) -> None:
    """Run the optimizer of ZeRO-3 on each partition, which creates its state, and on nothing else.

    `DeepSpeedZeroOptimizer_Stage3` gives its torch optimizer parameters only within `_optimizer_step`
    (`deepspeed/runtime/zero/stage3.py`), one partition at a time; the public `step` also clips and reduces.
    """
    for index in range(len(zero.fp32_partitioned_groups_flat)):
        zero._optimizer_step(index)


@torch.no_grad()
def update_zero3_copies(zero: Any) -> None:
    """Copy the fp32 partitions to the partitions and gathered parameters that the forward pass reads. Collective.

    The public `safe_set_full_fp32_param` needs optimizer state that is linked to parameters, which happens in the first
    step only, and takes full tensors. `_reassign_or_swap_out_partitioned_parameters` is what `step` calls itself.
    """
    zero.checkpoint_event_prologue()
    for index in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(index)
    zero.checkpoint_event_epilogue()


def restore_cpu_adam_step(optimizer: Any) -> None:
    """Advance the step counter of DeepSpeedCPUAdam's kernel from 1 to the loaded step, on a single number.

    The kernel multiplies powers of the betas step by step; if the step jumps, it uses `pow` instead, whose last bit
    differs (`IncrementStep` in `csrc/includes/cpu_adam.h`), and the resumed run would not be bitwise identical. 100,000
    steps take about a second. Nothing happens for other optimizers.
    """
    kernel = getattr(optimizer, "ds_opt_adam", None)
    if kernel is None or not optimizer.state:
        return
    last = max(int(state["step"]) for state in optimizer.state.values())
    group = optimizer.param_groups[0]
    number = [torch.zeros(1) for _ in range(4)]
    for step in range(1, last + 1):
        kernel.adam_update(optimizer.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, True, *number)
