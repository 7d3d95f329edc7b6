"""A plugin's loss is summed over the targets; anything but a loss of each is refused with one message."""

import pytest
import torch

from finetune.errors import UserError
from finetune.task.lm_loss.target_loss import require_one_loss_each


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        (torch.tensor(1.5), "a tensor of shape [], which is a mean or a sum"),
        (torch.ones(2, 3), "a tensor of shape [2, 3]"),
        (torch.ones(5), "a tensor of shape [5]"),
        (torch.ones(6, dtype=torch.int64), "a tensor of shape [6] and type torch.int64"),
        (1.5, "float"),
        (None, "NoneType"),
    ],
)
def test_a_loss_that_is_not_one_number_for_each_target_is_refused(losses, found):
    with pytest.raises(UserError) as error:
        require_one_loss_each(losses, 6, name="mine", what="target")
    assert str(error.value).startswith(f"the loss `mine` returned {found}. Return the loss of each target")
    assert "shape [6]" in str(error.value)


def test_a_loss_of_each_target_is_accepted():
    require_one_loss_each(torch.ones(6), 6, name="mine", what="target")
    require_one_loss_each(torch.ones(0), 0, name="mine", what="target")
