import sys

import pytest
import torch

from finetune.runtime.pages import LARGE_BYTES, ask_for_huge_pages


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked")
def test_a_large_tensor_holds_what_is_written_to_it_in_whatever_pages():
    tensor = torch.empty(LARGE_BYTES, dtype=torch.uint8)
    ask_for_huge_pages(tensor)  # a kernel without them declines
    assert int(tensor.fill_(3).sum()) == 3 * LARGE_BYTES


def test_nobody_is_asked_for_a_small_tensor_or_one_on_another_device():
    assert not ask_for_huge_pages(torch.empty(1000))
    assert not ask_for_huge_pages(torch.empty(LARGE_BYTES, device="meta"))
