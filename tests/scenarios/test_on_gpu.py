"""The same job, each time with something that makes it fast on a GPU: it leaves the losses what they are.

The forms for a CPU are small and say little of speed; they show that nothing in the way of the large ones is broken.
"""

from importlib.util import find_spec

import pytest

from tests.devices import ON_GPU

pytestmark = pytest.mark.timeout(600)

SIZE = {
    "cpu": [],
    "cuda": [
        "model.from_config.values={hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 4, "
        "num_attention_heads: 8, num_key_value_heads: 2, tie_word_embeddings: true}",
        "train.learning_rate=1e-3",
        "train.tf32=false",
    ],
}
BF16 = ["train.precision=bf16"]
END_TO_END = [*BF16, "data.batching.padding_free=true"]
LORA = ["model.lora={rank: 4, alpha: 8}", "model.dtype=bfloat16"]
COMPILED = ["model.compile=regional"]

PAIRS = {
    "bf16 arithmetic": ([], BF16, 2e-2),
    "compiled": ([], COMPILED, 1e-4),
    "compiled in bf16": (BF16, [*BF16, *COMPILED], 2e-2),
    "compiled rows": (END_TO_END, [*END_TO_END, *COMPILED], 2e-2),
    "one kernel for a row of samples": ([*BF16, "data.batching.padding_free=false"], END_TO_END, 2e-2),
    "frozen bf16 weights": ([LORA[0]], [*BF16, *LORA], 3e-2),
    "recomputed": (BF16, [*BF16, "model.gradient_checkpointing=selective"], 1e-2),
    "pinned memory and workers": (BF16, [*BF16, "data.pin_memory=true", "data.num_workers=2"], 1e-6),
}
ON_CPU = ("compiled", "one kernel for a row of samples", "frozen bf16 weights", "recomputed")


@pytest.fixture(scope="module")
def losses(launch):
    """Return a function from overrides to the losses of the run with them; each is launched once."""
    known = {}

    def of(device, overrides):
        key = (device, *overrides)
        if key not in known:
            run = launch(None, name=f"{device}-{len(known)}", overrides=[*SIZE[device], *overrides])
            assert run.code == 0, run.output
            known[key] = run.losses()
        return known[key]

    return of


@pytest.mark.parametrize(
    ("device", "name"),
    [
        *(pytest.param("cpu", name, marks=pytest.mark.full) for name in ON_CPU),
        *(pytest.param("cuda", name, marks=ON_GPU) for name in PAIRS),
    ],
)
def test_paired_settings_train_with_the_same_losses(losses, figure, device, name):
    plain, changed, tolerance = PAIRS[name]
    expected = losses(device, plain)
    assert expected[-1] < expected[0] - (0.5 if LORA[0] not in plain else 0.05)  # adapters start at nothing
    worst = max(abs(got / wanted - 1) for got, wanted in zip(losses(device, changed), expected, strict=True))
    figure(f"{name}: relative difference of {len(expected)} losses", worst, at_most=tolerance)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_the_loss_of_liger_is_ours(losses):
    chunked = losses("cuda", ["train.loss_kernel=chunked"])
    assert losses("cuda", ["train.loss_kernel=liger"]) == pytest.approx(chunked, rel=1e-5)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
@pytest.mark.parametrize("method", [[], LORA], ids=["full", "lora"])
def test_layers_and_chunks_with_kernels_of_liger_have_the_losses_of_those_without(losses, method):
    plain, fused = (losses("cuda", [*BF16, *method, f"model.kernels={kernels}"]) for kernels in ("none", "liger"))
    assert fused == pytest.approx(plain, rel=2e-2)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_flash_attention_of_rows_is_ours(losses):
    flash = [*END_TO_END, "model.attention=flash_attention_2"]
    assert losses("cuda", flash) == pytest.approx(losses("cuda", END_TO_END), rel=2e-2)
