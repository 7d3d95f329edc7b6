"""The balance loss is that of the whole step: transformers' on one batch, and the same however that is cut."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext
from finetune.task.router_loss import (
    RoutedTask,
    RoutingRecorder,
    find_routers,
)
from tests.refusals import refused

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_FINE = {**_SIZES, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "qk_nope_head_dim": 8,
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16, "head_dim": 8},
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_LOCAL = {**_SIZES, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2}

SOFTMAX: dict[str, dict[str, Any]] = {
    "mixtral": _LOCAL,
    "qwen3_moe": {**_FINE, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_next": {**_FINE, **_LINEAR, "num_experts": 8},
    "qwen3_5_moe_text": {**_FINE, **_LINEAR, "num_experts": 8},
    "gpt_oss": {**_LOCAL, "head_dim": 8},
    "olmoe": {**_SIZES, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {**_LOCAL, **_MAMBA, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]},
}
SIGMOID: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_FINE, **_GROUPED, **_LATENT},
    "glm4_moe": {**_FINE, **_GROUPED},
    "lfm2_moe": {**_FINE, "num_experts": 8, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
}
VOCABULARY = 64


def mixture(model_type: str, **values: Any) -> PreTrainedModel:
    """Return the model in training mode, its routers far enough from balance that experts differ."""
    known = {**SOFTMAX, **SIGMOID}.get(model_type, {})
    special = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0}
    config = AutoConfig.for_model(model_type, **{**known, **special, **values})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


LENGTHS = (9, 3, 14, 6)
COEFFICIENT = 0.5


def features():
    chance = np.random.default_rng(0)
    return [
        Features({"input_ids": chance.integers(1, VOCABULARY, length), "is_target": np.ones(length, bool)}, number)
        for number, length in enumerate(LENGTHS)
    ]


def causal_task(*, is_free=False):
    data = DataSection(train=TrainingSourceSection(path="rows.jsonl"), batching=BatchingSection(padding_free=is_free))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0)
    return CausalTask(TaskContext(TaskSection(name="pretrain"), data, tokenizer))


class Step:
    """A step over four samples, cut into microbatches, as the loop takes it."""

    def __init__(self, model, *, num_batches=1, coefficient: float | None = COEFFICIENT, is_free=False):
        task = causal_task(is_free=is_free)
        routed = RoutedTask(task, RoutingRecorder(model, find_routers(model)), coefficient, lambda batch: None)
        size = len(LENGTHS) // num_batches
        batches = [task.collate(features()[start : start + size]) for start in range(0, len(LENGTHS), size)]
        num_targets = sum(batch.num_targets for batch in batches)
        model.zero_grad()
        torch.manual_seed(5)
        self.batches = routed.prepare_step(model, batches)
        self.sums: list[dict[str, Tensor]] = []
        for batch in self.batches:
            self.sums.append(dict(routed.loss_sums(model, batch)))
            (self.sums[-1]["loss_sum"] / num_targets).backward()
        self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        self.loss = float(self.total("loss_sum")) / num_targets

    def total(self, name: str) -> Tensor:
        return torch.stack([sums[name].detach() for sums in self.sums]).sum(dim=0)


def relative(found, wanted):
    """Return the distance of all gradients together, relative to their length."""
    assert found.keys() == wanted.keys()
    apart = torch.stack([(found[name] - each).norm() for name, each in wanted.items()]).norm()
    return float(apart / torch.stack([each.norm() for each in wanted.values()]).norm())


@pytest.mark.parametrize("model_type", SOFTMAX)
def test_loss_and_gradient_of_one_whole_batch_are_those_of_transformers(model_type):
    model = mixture(model_type)
    step = Step(model)
    batch = step.batches[0]
    model.zero_grad()
    output = model(**batch.inputs, output_router_logits=True, use_cache=False)
    assert float(step.total("router_aux_loss")) == pytest.approx(output.aux_loss.item(), rel=1e-6)
    plain = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.labels.flatten())
    assert step.loss == pytest.approx(plain.item(), rel=1e-6)
    (plain + COEFFICIENT * output.aux_loss).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert relative(step.gradients, wanted) < 1e-5


@pytest.mark.parametrize("is_free", [False, True], ids=["padded", "in one row"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_cut_of_a_step_changes_nothing(model_type, is_free):
    model = mixture(model_type)
    whole = Step(model, is_free=is_free)
    for num_batches in (2, 4):
        cut = Step(model, num_batches=num_batches, is_free=is_free)
        assert torch.equal(cut.total("tokens_per_expert"), whole.total("tokens_per_expert"))
        assert float(cut.total("router_aux_loss")) == pytest.approx(float(whole.total("router_aux_loss")), rel=1e-6)
        assert relative(cut.gradients, whole.gradients) < 1e-5
    of_each = [Step(model, num_batches=4, is_free=is_free).sums[number]["router_aux_loss"] for number in range(4)]
    assert max(of_each) > 1.5 * min(of_each)  # the microbatches do differ


@pytest.mark.parametrize("model_type", SIGMOID)
def test_routers_with_a_sigmoid_are_balanced_over_the_step_too(model_type):
    model = mixture(model_type)
    whole, cut = Step(model), Step(model, num_batches=4)
    assert float(cut.total("router_aux_loss")) == pytest.approx(float(whole.total("router_aux_loss")), rel=1e-6)
    assert relative(cut.gradients, whole.gradients) < 1e-5
    assert 2.0 < float(whole.total("router_aux_loss")) < 8.0  # two experts for a token: 2 is balance, 8 one expert
    plain = Step(model, coefficient=None)
    gate = find_routers(model)[0].name
    assert not torch.allclose(whole.gradients[f"{gate}.weight"], plain.gradients[f"{gate}.weight"], rtol=1e-3)


def test_padding_is_sent_to_experts_and_does_not_count():
    step = Step(mixture("mixtral"))
    assert step.batches[0].inputs["attention_mask"].numel() > sum(LENGTHS)
    assert step.total("tokens_per_expert").sum(dim=1).tolist() == [2 * sum(LENGTHS)] * 2  # two layers, two experts


def test_the_logged_loss_is_bitwise_that_of_the_task():
    model = mixture("mixtral")
    assert Step(model, num_batches=2).loss == Step(model, num_batches=2, coefficient=None).loss


def test_recomputed_layers_are_not_counted_twice():
    model = mixture("qwen3_moe")
    plain = Step(model, num_batches=2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = Step(model, num_batches=2)
    assert torch.equal(again.total("tokens_per_expert"), plain.total("tokens_per_expert"))
    assert relative(again.gradients, plain.gradients) < 1e-6


def test_the_pass_before_the_step_draws_the_same_random_numbers_and_leaves_them():
    model = mixture("mixtral", attention_dropout=0.3, router_jitter_noise=0.2)
    step = Step(model, num_batches=4)
    *counted, num_targets = step.batches[0].extras["router_totals"].tolist()
    assert counted == step.total("tokens_per_expert").sum(dim=0).tolist()
    assert num_targets == sum(LENGTHS) - len(LENGTHS)
    plain = Step(model, num_batches=4, coefficient=None)  # without that pass
    assert step.loss == plain.loss
    assert Step(mixture("mixtral"), num_batches=4).loss != plain.loss  # there is something to draw


def test_metrics_of_a_step_are_the_task_s_and_the_routers():
    model = mixture("mixtral")
    routed = RoutedTask(causal_task(), RoutingRecorder(model, find_routers(model)), 0.1, lambda batch: None)
    sums = {"loss_sum": 6.0, "cross_entropy": 4.0, "router_aux_loss": 2.5, "tokens_per_expert": [[3.0, 1.0]]}
    assert routed.step_metrics(sums, num_targets=2) == {
        **{"cross_entropy": 2.0, "router_aux_loss": 2.5},
        **{"expert_load_max": 1.5, "experts_unused": 0.0},
    }
    counted = replace(routed, coefficient=None)
    assert "router_aux_loss" not in counted.step_metrics({"tokens_per_expert": [[3.0, 1.0]]}, num_targets=2)


def on_meta(model_type, **values):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))


@pytest.mark.parametrize("model_type", [*SOFTMAX, *SIGMOID])
def test_every_layer_with_experts_has_one_router_whose_scores_are_known(model_type):
    values = {**SOFTMAX, **SIGMOID}[model_type]
    routers = find_routers(on_meta(model_type, vocab_size=64, **values))
    dense = values.get("first_k_dense_replace", values.get("num_dense_layers", len(values.get("mlp_only_layers", ()))))
    assert len(routers) == values["num_hidden_layers"] - dense
    wanted = "softmax" if model_type in SOFTMAX else "sigmoid"
    assert {(each.num_experts, each.top_k, each.score_function) for each in routers} == {(8, 2, wanted)}


def test_a_dense_model_has_none():
    assert find_routers(on_meta("llama", num_hidden_layers=1)) == ()


@pytest.mark.parametrize(("model_type", "router"), [("phimoe", "PhimoeTopKRouter"), ("llama4_text", "Llama4Router")])
def test_routers_that_choose_in_another_way_are_refused(model_type, router):
    with refused(ModelError, router):
        find_routers(on_meta(model_type, num_hidden_layers=1))


@pytest.mark.parametrize(
    ("trained", "place"),
    [({}, "gate"), ({"modules_to_save": ["gate"]}, "gate.modules_to_save.default")],
    ids=["frozen", "copied"],
)
def test_routers_are_found_inside_adapters(trained, place):
    model = get_peft_model(mixture("mixtral"), LoraConfig(r=2, target_modules=["q_proj"], **trained))
    layers = [f"base_model.model.model.layers.{layer}.mlp" for layer in (0, 1)]
    assert [each.name for each in find_routers(model)] == [f"{layer}.{place}" for layer in layers]


def test_routers_with_adapters_of_their_own_are_called_through_them():
    model = get_peft_model(mixture("mixtral"), LoraConfig(r=2, target_parameters=["gate.weight"]))
    assert [each.name.rpartition("mlp.")[2] for each in find_routers(model)] == ["gate.base_layer"] * 2


def test_weights_that_zero3_has_partitioned_are_not_needed():
    model = mixture("deepseek_v3")
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert [each.score_function for each in find_routers(model)] == ["sigmoid"]


class Replayed:
    """A task whose forward pass is over: only what the routers returned comes again."""

    def __init__(self, model, recorder):
        self._recorder, self._before = recorder, []
        ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids).tril(6)
        with recorder.recording() as routings:
            loss = model(input_ids=ids, attention_mask=mask, use_cache=False).logits.sum()
        self._sums, self._routings = {"loss_sum": loss}, list(routings)
        self.batch = Batch({"input_ids": ids}, ids, num_targets=16, num_tokens=16, sample_ids=(0, 1))

    def prepare_step(self, model, batches):
        return batches

    def loss_sums(self, model, batch):
        self._recorder._routings.extend(self._routings)
        return self._sums


def test_counts_totals_and_the_loss_stay_on_the_device():
    model = mixture("mixtral")
    recorder = RoutingRecorder(model, find_routers(model))
    replayed = Replayed(model, recorder)
    routed = RoutedTask(replayed, recorder, 0.1, lambda batch: None)

    def step():
        for batch in routed.prepare_step(model, [replayed.batch] * 2):
            routed.loss_sums(model, batch)

    step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    names = [event.name for event in seen.events()]
    assert names.count("aten::scatter_add_") >= 4
    assert not {"aten::_local_scalar_dense", "aten::nonzero"} & set(names)
