import pytest
import torch

from finetune.config.sections.model import LoraSection
from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.size import measure_model
from finetune.train.optim.optimizers import build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.refusals import refused

BATCH = torch.arange(24).reshape(2, 12)


def trained_names(model) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("keys", [{}, {"rslora": True}, {"dora": True}, {"modules_to_save": ("lm_head",)}])
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_new_adapters_do_not_change_the_output_and_all_get_gradients(architecture_name, from_config, build, keys):
    model = build(from_config(architecture_name)).eval()
    with torch.no_grad():
        expected = model(input_ids=BATCH).logits
    if keys.get("modules_to_save") and architecture_name == "gpt2 tied":  # see test_ties.py
        with refused(ModelError, "`transformer.wte`, `lm_head`"):
            add_adapter(model, LoraSection(rank=2, **keys), AdapterContext(seed=1))
        return
    adapted = add_adapter(model, LoraSection(rank=2, **keys), AdapterContext(seed=1))
    output = adapted(input_ids=BATCH, labels=BATCH)
    assert torch.allclose(output.logits, expected, atol=1e-5)
    output.loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    others = {name for name in trained_names(adapted) if ".lora_" not in name}
    saved = "model.embed_tokens" if architecture_name.endswith(" tied") else "lm_head"
    assert others == (
        {f"base_model.model.{saved}.modules_to_save.default.weight"} if "modules_to_save" in keys else set()
    )


def test_all_linear_is_every_linear_layer_but_the_head(from_config, build):
    adapted = add_adapter(build(from_config()), LoraSection(rank=2), AdapterContext(seed=1))
    modules = {name.split(".")[-4] for name in trained_names(adapted)}
    assert modules == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    size = measure_model(adapted)
    assert size.num_adapted_modules == 14
    assert size.num_trained == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_adapters_depend_on_the_seed_and_their_name_alone(from_config, build):
    torch.manual_seed(1)
    all_modules = add_adapter(build(from_config()), LoraSection(rank=2), AdapterContext(seed=1))
    torch.manual_seed(2)
    few = add_adapter(build(from_config()), LoraSection(rank=2, target_modules=("v_proj",)), AdapterContext(seed=1))
    other = add_adapter(build(from_config()), LoraSection(rank=2), AdapterContext(seed=2))
    names = [name for name in trained_names(few) if "lora_A" in name]
    assert len(names) == 2
    for name in names:
        assert torch.equal(few.get_parameter(name), all_modules.get_parameter(name))
        assert not torch.equal(few.get_parameter(name), other.get_parameter(name))


def test_adapters_on_a_bfloat16_base_are_float32_with_the_same_values(from_config, build):
    exact = add_adapter(build(from_config()), LoraSection(rank=2), AdapterContext(seed=1))
    mixed = add_adapter(build(from_config(dtype="bfloat16")), LoraSection(rank=2), AdapterContext(seed=1))
    for name in trained_names(mixed):
        assert mixed.get_parameter(name).dtype == torch.float32
        assert torch.equal(mixed.get_parameter(name), exact.get_parameter(name))
    assert mixed.get_input_embeddings().weight.dtype == torch.bfloat16


def test_a_frozen_base_has_no_gradients_and_no_optimizer_state(from_config, build):
    model = add_adapter(build(from_config(dtype="bfloat16")), LoraSection(rank=2), AdapterContext(seed=1))
    optimizer = build_optimizer(list_parameters(model), OptimizerSection(), learning_rate=0.1)
    ids = torch.arange(24).reshape(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert {name for name, each in model.named_parameters() if each.grad is not None} == trained
    assert len(optimizer.state) == len(trained)
    assert {model.get_parameter(name).dtype for name in trained} == {torch.float32}
