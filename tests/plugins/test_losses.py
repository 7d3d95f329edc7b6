"""A plugin's loss is summed over the targets; anything but a loss of each is refused with one message."""

import pytest
import torch

from finetune.errors import UserError
from finetune.task.lm_loss.target_loss import require_one_loss_each

SCORES = torch.arange(6.0, requires_grad=True)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        (torch.tensor(1.5), "a tensor of shape [], which is a mean or a sum"),
        (torch.ones(2, 3), "a tensor of shape [2, 3]"),
        (torch.ones(5), "a tensor of shape [5]"),
        (torch.ones(6, dtype=torch.int64), "a tensor of type torch.int64"),
        (torch.ones(6, device="meta"), "a tensor on meta, not on cpu"),
        (torch.ones(6), "a tensor through which no gradient reaches the model"),
        (torch.ones(6, requires_grad=True) * 2, "a tensor through which no gradient reaches the model"),
        (SCORES.detach() + 1, "a tensor through which no gradient reaches the model"),
        (1.5, "a float"),
        (None, "a NoneType"),
    ],
)
def test_a_loss_that_is_not_one_number_for_each_target_is_refused(losses, found):
    with pytest.raises(UserError) as error:
        require_one_loss_each(losses, [SCORES], name="mine", what="target")
    assert str(error.value).startswith(f"the loss `mine` returned {found}")
    assert "the loss of each target" in str(error.value) and "shape [6]" in str(error.value)


def test_a_loss_of_each_target_is_accepted():
    require_one_loss_each(SCORES, [SCORES], name="mine", what="target")
    require_one_loss_each(-(SCORES.exp() ** 2) * SCORES, [SCORES], name="mine", what="target")
    require_one_loss_each(SCORES[:3] * 2, [torch.ones(3), SCORES], name="mine", what="pair")
    require_one_loss_each(torch.ones(0), [SCORES[:0]], name="mine", what="target")


def test_an_evaluation_asks_for_no_gradient():
    with torch.no_grad():
        require_one_loss_each(SCORES * 2, [SCORES * 3], name="mine", what="target")
