"""The same job on a GPU: each thing that makes it fast there leaves the losses what they are."""

from importlib.util import find_spec

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(900),
]

BF16 = ["train.precision=bf16"]
END_TO_END = [*BF16, "data.batching.padding_free=true"]
LORA = ["model.lora={rank: 4, alpha: 8}", "model.dtype=bfloat16"]

PAIRS = {
    "bf16 arithmetic": ([], BF16, 2e-2),
    "compiled": ([], ["model.compile=regional"], 1e-4),
    "compiled in bf16": (BF16, [*BF16, "model.compile=regional"], 2e-2),
    "compiled rows": (END_TO_END, [*END_TO_END, "model.compile=regional"], 2e-2),
    "one kernel for a row of samples": ([*BF16, "data.batching.padding_free=false"], END_TO_END, 2e-2),
    "frozen bf16 weights": (["model.lora={rank: 4, alpha: 8}"], [*BF16, *LORA], 3e-2),
    "recomputed": (BF16, [*BF16, "model.gradient_checkpointing=selective"], 1e-2),
    "pinned memory and workers": (BF16, [*BF16, "data.pin_memory=true", "data.num_workers=2"], 1e-6),
}


@pytest.fixture(scope="module")
def losses(launch):
    """Return a function from overrides to the losses of the run with them; each is launched once."""
    known = {}

    def of(overrides):
        key = tuple(overrides)
        if key not in known:
            run = launch(None, name=f"gpu-{len(known)}", overrides=overrides)
            assert run.code == 0, run.output
            known[key] = run.losses()
        return known[key]

    return of


@pytest.mark.parametrize("name", PAIRS)
def test_it_learns_alike(losses, name):
    plain, changed, tolerance = PAIRS[name]
    expected = losses(plain)
    assert expected[-1] < expected[0] - 0.5
    assert losses(changed) == pytest.approx(expected, rel=tolerance)


@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_the_loss_of_liger_is_ours(losses):
    assert losses(["train.loss_kernel=liger"]) == pytest.approx(losses(["train.loss_kernel=chunked"]), rel=1e-5)


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_flash_attention_of_rows_is_ours(losses):
    flash = [*END_TO_END, "model.attention=flash_attention_2"]
    assert losses(flash) == pytest.approx(losses(END_TO_END), rel=2e-2)
