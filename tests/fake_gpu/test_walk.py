"""Whole runs on an H100 that is not there: no tensor of the CPU meets one of the GPU, and steps do not wait for it.

Every task in all its variants runs with `pytest -m slow`, the quickest of each family with `pytest`.
"""

from unittest.mock import patch

import pytest
import torch

from finetune.model import activations
from finetune.model import build as model_build
from finetune.task import causal_lm
from finetune.train import loop, step
from tests.fake_gpu.walk import CPU_BUILD, Launch, walk
from tests.task_cases import CASES
from tests.task_cases.runs import prepare

pytestmark = CPU_BUILD

AN_INDEX = "peft makes an index of Python's numbers in each pass and sends it"
A_MASK = "transformers reads a value in its encoder: whether a row of texts is padded, or one of the images"
KNOWN = {
    (
        "train/update.py __call__",
        "_local_scalar_dense",
    ): "an optimizer without `found_inf` (muon, lion, schedule-free): "
    "the host reads the norm of each step to leave out one that is not finite",
    ("task/lm_loss/at_targets.py logits_everywhere", "_local_scalar_dense"): A_MASK,
    ("task/lm_loss/at_targets.py logits_everywhere", "_to_copy"): AN_INDEX,
    ("task/lm_loss/at_targets.py logits_everywhere", "torch.tensor"): AN_INDEX,
    ("task/lm_loss/at_targets.py compute_at_targets", "_to_copy"): AN_INDEX,
    ("task/lm_loss/head.py linear_weights", "_to_copy"): AN_INDEX,
    ("task/lm_loss/head.py logits", "_to_copy"): AN_INDEX,
}
"""What the host waits for in a step, and why: everything else that a walk finds fails it."""

ALLOWED_IN = {"new_tokens-lora", "adapters-prompt", "adapters-prefix", "seq2seq-full", "seq2seq-lora"} | {
    "seq2seq_answers-full", "seq2seq_answers-lora", "training-muon", "training-lora_muon", "training-sched_free",
    "training-lion", "vision_language_sft-full", "vision_language_sft-lora",
}  # fmt: skip
"""The variants in which that is known; in any other it fails, too."""

QUICK = {"sft": ("full", "lora"), "dpo": ("lora",)}
ON_MANY = ("dpo", "embedding", "text_classification", "images", "reward", "seq2seq")
TO_HOST = activations.CudaStreamCopies.to_host
NOT_COMPILED = {"compiled", "comp_full", "comp_lora"}
"""Variants that compile: what the compiler makes of an operator is not dispatched."""

NOT_LOADED = "quantized"
"""The case of bitsandbytes, which loads a library by the device; `PackedLinear` stands in for its layers."""

PAIRS = [
    (case, variant)
    for case in CASES
    for variant in case.variants
    if variant not in NOT_COMPILED and case.name != NOT_LOADED
]


def pairs():
    for case, variant in PAIRS:
        marks = () if variant in QUICK.get(case.name, ()) else (pytest.mark.slow,)
        yield pytest.param(case, variant, id=f"{case.name}-{variant}", marks=marks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("walks")


def start(folder, name, variant, *overrides, launch=Launch(), **options):  # noqa: B008  # frozen
    """Prepare the case and walk its run; a case is prepared once."""
    case = next(case for case in CASES if case.name == name)
    if not (folder / name).exists():
        prepare([case], folder)
    place = folder / name / f"run-{len(list((folder / name).glob('run-*')))}"
    return walk(folder / name / "job.yaml", place, *case.variants[variant], *overrides, launch=launch, **options)


def unknown(walked, name=""):
    """Return the sentences on what is not known for this variant."""
    known = KNOWN if name in ALLOWED_IN else {}
    return [
        str(finding)
        for finding in walked.findings
        if (finding.caller, finding.operation.removeprefix("aten::")) not in known
    ]


@pytest.mark.parametrize(("case", "variant"), list(pairs()))
def test_a_run_on_one_gpu_does_not_wait_for_it(folder, case, variant):
    walked = start(folder, case.name, variant)
    assert unknown(walked, f"{case.name}-{variant}") == []
    assert walked.timeline.races == {}
    assert walked.gpu.num_operations > 1000
    assert walked.timeline.num_ordered > 10  # its batches were prefetched
    assert (walked.folder / "final").exists()


@pytest.mark.parametrize("variant", ["full", "lora"])
@pytest.mark.parametrize("launch", [Launch("ddp", 1, 8), Launch("fsdp2", 2, 8)], ids=lambda launch: launch.strategy)
@pytest.mark.parametrize("name", ["sft", *(pytest.param(name, marks=pytest.mark.slow) for name in ON_MANY)])
def test_a_run_on_many_gpus_does_not_wait_for_them(folder, name, launch, variant):
    walked = start(folder, name, variant, "train.global_batch_size=32", "train.precision=bf16", launch=launch)
    assert unknown(walked, f"{name}-{variant}") == []
    assert walked.timeline.races == {}
    assert walked.gpu.num_operations > 1000
    wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"}[launch.strategy]
    assert wrapped in {cls.__name__ for cls in type(walked.components.model).__mro__}


def test_dtypes_are_those_that_were_asked_for(folder):
    seen = {}

    def look(walked):
        components = walked.components
        seen["weights"] = {weight.dtype for weight in components.model.parameters()}
        state = components.optimizer.optimizer.state.values()
        seen["state"] = {value.dtype for entry in state for value in entry.values() if value.ndim}

    linear, take_step, products = torch.nn.functional.linear, loop.take_step, set()

    def noted(*given):
        result = linear(*given)
        products.add(result.dtype)
        return result

    def watched(*given, **named):
        with patch.object(torch.nn.functional, "linear", noted):
            return take_step(*given, **named)

    with patch.object(loop, "take_step", watched):
        start(folder, "sft", "full", "train.precision=bf16", inspect=look)
    assert seen == {"weights": {torch.float32}, "state": {torch.float32}}
    assert products == {torch.bfloat16}


class PackedLinear(torch.nn.Linear):
    """A frozen layer with weights of 8 bits, which are made wide in each pass."""

    def __init__(self, plain):
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        scale = plain.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((plain.weight.detach() / scale).to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, rows):
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype) * self.scale.to(rows.dtype))


def test_adapters_on_a_packed_base_do_not_wait(folder):
    load = model_build.load_model

    def load_packed(*given, **named):
        model = load(*given, **named)
        for layer in model.model.layers:
            for module in (layer.self_attn, layer.mlp):
                for name, child in list(module.named_children()):
                    if type(child) is torch.nn.Linear:
                        setattr(module, name, PackedLinear(child))
        return model

    with patch.object(model_build, "load_model", load_packed):
        walked = start(folder, "sft", "lora", "train.precision=bf16")
    packed = [module for module in walked.components.model.modules() if isinstance(module, PackedLinear)]
    assert len(packed) == 14 and all(module.weight.dtype == torch.int8 for module in packed)
    assert unknown(walked) == []
    assert walked.timeline.races == {}


def test_a_run_that_offloads_activations_waits_for_no_copy_on_the_host(folder):
    everything = patch.dict(activations.offload_activations.__kwdefaults__, smallest_bytes=0)
    with everything, patch.object(activations.CudaStreamCopies, "to_host", autospec=True) as to_host:
        to_host.side_effect = TO_HOST
        walked = start(folder, "sft", "full", "model.activation_offload=true")
    assert to_host.call_count > 50
    assert unknown(walked) == []
    assert walked.timeline.races == {}


def test_a_tensor_of_the_cpu_in_a_step_is_found(folder, monkeypatch):
    loss_sums = causal_lm.CausalTask.loss_sums

    def faulty(task, model, batch):
        sums = dict(loss_sums(task, model, batch))
        return {**sums, "loss_sum": (sums["loss_sum"] * torch.ones(1)).sum()}

    monkeypatch.setattr(causal_lm.CausalTask, "loss_sums", faulty)
    with pytest.raises(RuntimeError, match="mul: expected all tensors to be on the same device"):
        start(folder, "sft", "full")


def test_a_synchronization_in_a_step_is_found(folder, monkeypatch):
    update = step.update_weights

    def faulty(components, progress):
        norm, is_taken = update(components, progress)
        assert norm.item() > 0
        return norm, is_taken

    monkeypatch.setattr(step, "update_weights", faulty)
    walked = start(folder, "sft", "full")
    assert unknown(walked) == [
        "train/step.py take_step: aten::_local_scalar_dense waits for the GPU: its result goes to the host"
    ]
