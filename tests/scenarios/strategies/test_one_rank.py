"""Each strategy with one rank is one process: on a CPU over gloo, on a GPU over NCCL, where no second GPU is needed."""

import pytest
from safetensors.torch import load_file

from finetune.checkpoint.format.manifest import read_manifest
from tests.devices import ON_GPU, needs

STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
ON_CPU = {("fsdp2", "bf16"), ("zero3", "fp32")}
"""What is enough of it without a GPU, where tests of two processes take every strategy."""
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
GPU = [
    "model.from_config.values={hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 2, tie_word_embeddings: true}",
    "train.learning_rate=3e-4",
]
"""A model whose kernels are those of large ones: heads of 128 numbers in groups of four."""

WILD = (
    "model.from_config.values={hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 2, initializer_range: 0.5, tie_word_embeddings: true}"
)

SIZE = {"cpu": [], "cuda": [*GPU, "train.tf32=false"]}
TWENTY = ["train.steps=20", "checkpoint.every_steps=null", "evaluate=null", "data.validation=null"]
EIGHT = ["evaluate=null", "data.validation=null", "checkpoint.every_steps=4"]

LORA = "model.lora={rank: 4, alpha: 8, dropout: 0.1}"
full = pytest.mark.full
pytestmark = pytest.mark.distributed


def cases():
    for precision in TOLERANCE:
        for strategy in STRATEGIES:
            if (strategy, precision) in ON_CPU:
                yield pytest.param("cpu", strategy, precision, marks=full)
            yield pytest.param("cuda", strategy, precision, marks=[*ON_GPU, *needs(strategy)])


@pytest.fixture(scope="module")
def run_of(launch):
    """Return a function that launches a job with one process, once."""
    known = {}

    def of(device, strategy, overrides, *, name):
        key = (device, strategy, *overrides)
        if key not in known:
            run = launch(
                strategy, name=f"one-{device}-{name}-{strategy}", processes=1, overrides=[*SIZE[device], *overrides]
            )
            assert run.code == 0, run.output
            known[key] = run
        return known[key]

    return of


def backend_of(run):
    group = run.environment()["process_group"]
    return group and (group["backend"], group["num_processes"])


@pytest.mark.parametrize(("device", "strategy", "precision"), list(cases()))
def test_twenty_steps_are_those_of_one_process(run_of, figure, device, strategy, precision):
    overrides = [*TWENTY, f"train.precision={precision}"]
    single = run_of(device, None, overrides, name=precision)
    run = run_of(device, strategy, overrides, name=precision)
    assert backend_of(single) is None
    assert backend_of(run) == ({"cpu": "gloo", "cuda": "nccl"}[device], 1)
    assert run.events("RunStarted")[0]["strategy"] == f"{strategy} on 1 process"
    assert len(single.losses()) == len(run.losses()) == 20
    assert single.losses()[-1] < single.losses()[0] - 0.5
    worst = max(abs(got / wanted - 1) for got, wanted in zip(run.losses(), single.losses(), strict=True))
    figure(f"{strategy}, {precision}: relative difference of 20 losses", worst, at_most=TOLERANCE[precision])


def chains():
    yield pytest.param("cuda", ("fsdp2", "zero3", "ddp"), marks=[*ON_GPU, *needs("zero3")])
    yield pytest.param("cuda", ("fsdp2", "ddp", None), marks=ON_GPU)
    yield pytest.param("cpu", ("fsdp2", "ddp", None), marks=full)


@pytest.mark.parametrize(("device", "chain"), list(chains()))
def test_a_run_that_changes_its_strategy_twice_takes_the_same_steps(launch, run_of, figure, device, chain):
    overrides = [*EIGHT, "train.steps=12"]
    whole, name = run_of(device, None, overrides, name="whole"), f"one-{device}-{'-'.join(map(str, chain))}"
    for strategy, stop in zip(chain, (4, 8, 12), strict=True):
        until = f"train.stop_after_steps={stop}"
        run = launch(strategy, name=name, processes=1, overrides=[*SIZE[device], *overrides, until])
        assert run.code == 0, run.output
    starts = [(event["step"], event["strategy"].split()[0]) for event in run.events("RunStarted")]
    assert starts == [(step, strategy or "single") for step, strategy in zip((0, 4, 8), chain, strict=True)]
    wanted, got = whole.losses(), run.losses()
    assert len(got) == 12
    worst = max(abs(each / other - 1) for each, other in zip(got, wanted, strict=True))
    figure(f"{', '.join(map(str, chain))}: relative difference of 12 losses", worst, at_most=1e-4)


def under(*strategies):
    yield pytest.param("cpu", "fsdp2", marks=full)
    for strategy in strategies:
        yield pytest.param("cuda", strategy, marks=[*ON_GPU, *needs(strategy or "single")])


@pytest.mark.parametrize(("device", "strategy"), list(under(None, "ddp", "fsdp2", "zero3")))
def test_a_resumed_run_is_the_straight_one_bit_by_bit(launch, run_of, device, strategy):
    overrides = [*EIGHT, "run.deterministic=true", "train.precision=bf16", LORA]
    whole, name = run_of(device, strategy, overrides, name="exact"), f"one-{device}-exact-{strategy}-twice"
    for until in ([*overrides, "train.stop_after_steps=4"], overrides):
        run = launch(strategy, name=name, processes=1, overrides=[*SIZE[device], *until])
        assert run.code == 0, run.output
    assert [event["step"] for event in run.events("RunStarted")] == [0, 4]
    assert run.losses() == whole.losses() and len(run.losses()) == 8
    assert run.norms() == whole.norms()
    assert state_of(run) == state_of(whole)


@pytest.mark.parametrize(("device", "strategy"), list(under(None, "ddp", "fsdp2", "zero2", "zero3")))
def test_a_loss_that_is_not_a_number_leaves_every_bit_of_the_weights(launch, device, strategy):
    overrides = [*SIZE[device], "evaluate=null", "data.validation=null", "checkpoint={every_steps: 1, keep_last: 9}"]
    overrides += ["train.steps=5", "train.nonfinite.action=skip"]
    faults = "forward step=3 do=nan"
    run = launch(strategy, name=f"one-{device}-nan-{strategy}", processes=1, overrides=overrides, faults=faults)
    assert run.code == 0, run.output
    assert [(event["step"], event["reason"]) for event in run.events("StepSkipped")] == [(4, "non-finite")]
    third, fourth, fifth = (weights_of(run, step) for step in (3, 4, 5))
    assert len(third) > 10
    assert all(third[name].equal(tensor) for name, tensor in fourth.items())
    assert not any(third[name].equal(tensor) for name, tensor in fifth.items() if "proj" in name)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.parametrize("strategy", [None, "fsdp2", pytest.param("zero2", marks=needs("zero2"))])
def test_a_resumed_run_continues_with_its_reduced_loss_scale(launch, run_of, figure, strategy):
    """Wild weights have gradients that overflow at 65,536, until the scale has been halved some times."""
    overrides = [*EIGHT, WILD, "train.precision=fp16", "checkpoint.every_steps=2"]
    whole, name = run_of("cuda", strategy, overrides, name="scale"), f"one-scale-{strategy}-twice"
    for until in ([*overrides, "train.stop_after_steps=2"], overrides):
        run = launch(strategy, name=name, processes=1, overrides=[*SIZE["cuda"], *until])
        assert run.code == 0, run.output
    wanted, got = ([(each["step"], each["reason"]) for each in one.events("StepSkipped")] for one in (whole, run))
    assert wanted[0] == (1, "loss scale")  # before the resume, after which a scale from the start would overflow anew
    assert got == wanted
    assert {reason for _, reason in wanted} == {"loss scale"}
    figure(f"{strategy or 'single'}: steps skipped by the loss scale, of 8", len(wanted), at_least=1, at_most=6)
    assert run.losses() == pytest.approx(whole.losses(), rel=1e-3)


def state_of(run):
    folder = run.folder / "checkpoints" / run.checkpoints()[-1]
    digest = read_manifest(folder).state_sha256
    assert len(digest) == 64
    return digest


def weights_of(run, step):
    files = (run.folder / "checkpoints" / f"step-{step:06d}" / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
