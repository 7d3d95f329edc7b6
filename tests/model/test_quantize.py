from importlib.util import find_spec

import pytest
import torch
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file

from finetune.config.sections.model import LoraSection, ModelSection, QuantizationSection
from finetune.errors import MissingPackage, ModelError
from finetune.model import frozen_models
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.frozen_models import (
    dequantize_while_loading,
    quantization_config,
    stored_method,
    stored_problems,
)
from finetune.model.loading.architecture import load_pretrained_config
from finetune.model.loading.load import load_empty_model
from finetune.model.size import measure_model
from tests.model.stored_weights import WRITERS, write_config

BATCH = torch.arange(24).reshape(2, 12)
NF4 = QuantizationSection(compute_dtype="float32")
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes (extra `quantization`) is not installed"
)
needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None, reason="torchao is not installed: it prints to stderr in every run"
)


@pytest.fixture(scope="module")
def folder(from_config, build, tmp_path_factory):
    place = tmp_path_factory.mktemp("base")
    build(from_config()).save_pretrained(place)
    return place


@pytest.fixture
def load(from_config, build, folder):
    """Return a function that loads the folder's model with these keys of the section."""
    return lambda **keys: build(from_config().model_copy(update={"from_config": None, "name": str(folder), **keys}))


def test_a_missing_package_is_named_with_its_install_command(from_config, monkeypatch):
    def absent(module, *, extra, purpose):
        raise MissingPackage(f"{purpose} needs `{module}`: pip install 'finetune-accelerate[{extra}]'")

    monkeypatch.setattr(frozen_models, "require", absent)
    with pytest.raises(
        MissingPackage, match=r"needs `bitsandbytes`: pip install 'finetune-accelerate\[quantization\]'"
    ):
        quantization_config(from_config(quantization=NF4))
    assert quantization_config(from_config()) is None


@needs_bitsandbytes
@pytest.mark.parametrize("keys", [{"kind": "nf4"}, {"kind": "fp4", "double": False}, {"bits": 8}])
def test_adapters_on_a_quantized_base_get_gradients(load, keys):
    plain, model = load().eval(), load(quantization=NF4.model_copy(update=keys))
    assert measure_model(model).num_parameters == measure_model(plain).num_parameters
    assert sum(measure_model(model).bytes_by_dtype.values()) < 0.7 * sum(measure_model(plain).bytes_by_dtype.values())
    adapted = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1))
    output = adapted(input_ids=BATCH, labels=BATCH)
    expected = plain(input_ids=BATCH).logits
    assert (output.logits - expected).std() < 0.3 * expected.std()
    output.loss.backward()
    trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
    assert len(trained) == 28
    assert all(".lora_" in name and each.grad is not None for name, each in trained.items())


@needs_bitsandbytes
def test_an_evaluation_leaves_packed_weights_as_they_are_stored(load):
    model = load(quantization=NF4, dtype="bfloat16").eval()
    held = [parameter for parameter in model.parameters() if type(parameter).__name__ == "Params4bit"]
    before = [bytes_of(each).clone() for each in held]
    with torch.no_grad():
        model(input_ids=BATCH)
    assert len(held) == 14
    assert all(torch.equal(then, bytes_of(each)) for then, each in zip(before, held, strict=True))


def bytes_of(parameter):
    return parameter.detach().view(torch.uint8)


@needs_bitsandbytes
def test_loftq_recovers_part_of_the_quantization_error(load, folder, from_config):
    model = load(quantization=NF4)
    wish = LoraSection(rank=8, alpha=4.0, init="loftq")
    adapted = add_adapter(model, wish, AdapterContext(seed=1, base=str(folder)))
    layer = adapted.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    original = load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    held = dequantize_module_weight(layer.get_base_layer()).detach().float()
    lost, left = original - held, original - held - layer.get_delta_weight("default")
    parts = torch.linalg.svdvals(lost)
    assert torch.linalg.norm(left).item() == pytest.approx(torch.linalg.norm(parts[8:]).item(), rel=1e-3)
    assert torch.linalg.norm(left) < 0.9 * torch.linalg.norm(lost)


@needs_bitsandbytes
def test_loftq_without_the_original_weights_is_rejected(load, tmp_path):
    with pytest.raises(ModelError, match="is not in the base's safetensors files"):
        add_adapter(load(quantization=NF4), LoraSection(init="loftq"), AdapterContext(seed=1, base=str(tmp_path)))


@needs_torchao
def test_adapters_on_torchao_weights_get_gradients(load):
    model = load(quantization=QuantizationSection(method="torchao", bits=8))
    adapted = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1))
    adapted(input_ids=BATCH, labels=BATCH).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)


@needs_bitsandbytes
def test_weights_stored_in_4_bits_are_loaded_as_they_are_and_get_adapters(load, build, tmp_path):
    load(quantization=QuantizationSection(), dtype="bfloat16").save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path), dtype="bfloat16", quantization=QuantizationSection())
    assert not list(stored_problems(load_pretrained_config(section), section))
    model = build(section)
    assert len([parameter for parameter in model.parameters() if type(parameter).__name__ == "Params4bit"]) == 14
    adapted = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1))
    adapted(input_ids=BATCH, labels=BATCH).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("method", WRITERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_quantized_weights_are_loaded_as_plain_ones_and_trained(build, tmp_path, method, dtype):
    if method == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    originals = WRITERS[method](tmp_path)
    model = build(ModelSection(name=str(tmp_path), dtype=dtype))
    weights = dict(model.named_parameters())
    assert len(originals) >= 4
    for name, original in originals.items():
        assert (weights[name].float() - original).norm() < 0.15 * original.norm(), name  # 4 bits
    assert {each.dtype for each in weights.values()} == {getattr(torch, dtype)}
    assert stored_method(model.config) is None
    model(input_ids=BATCH, labels=BATCH).loss.backward()
    assert all(each.grad is not None for each in weights.values())
    adapted = add_adapter(model, LoraSection(rank=2), AdapterContext(seed=1))
    adapted(input_ids=BATCH, labels=BATCH).loss.backward()
    assert all(parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("method", WRITERS)
def test_the_memory_of_stored_quantized_weights_is_that_of_plain_ones(tmp_path, method):
    """`finetune plan` predicts it from the model without weights."""
    WRITERS[method](tmp_path)
    section = ModelSection(name=str(tmp_path), dtype="bfloat16")
    empty = load_empty_model(section, head="causal_lm", vocabulary_size=None)
    plain = load_empty_model(
        section.model_copy(update={"name": str(tmp_path / "plain")}), head="causal_lm", vocabulary_size=None
    )
    assert measure_model(empty) == measure_model(plain)


def test_a_gpu_dequantizes_too(tmp_path):
    """On a GPU transformers would keep 8-bit weights for kernels without gradients."""
    WRITERS["fp8"](tmp_path)
    config = load_pretrained_config(ModelSection(name=str(tmp_path)))
    dequantize_while_loading(config)
    assert config.quantization_config["dequantize"] is True
    assert config.quantization_config["weight_block_size"] == [16, 16]


IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
IN_4_BITS |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
IN_8_BITS = {"load_in_8bit": True, "quant_method": "bitsandbytes"}
NF4_LINE = r"`model.quantization: {method: bitsandbytes, bits: 4, kind: nf4, double: true, compute_dtype: bfloat16}`"


@pytest.mark.parametrize(
    ("stored", "keys", "strategy", "key", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            {},
            "",
            "model.name",
            "stored quantized by gptq, which cannot be trained",
        ),
        ({"quant_method": "awq"}, {"quantization": NF4}, "", "model.name", "Name the model that it was made from"),
        ({"quant_method": "fp8"}, {"quantization": NF4}, "", "model.quantization", "Remove it, or name the model"),
        ({"quant_method": "mxfp4"}, {}, "zero3", "model.name", "Launch with fsdp2.yaml or zero2.yaml"),
        (IN_4_BITS, {}, "", "model.name", NF4_LINE),
        (IN_4_BITS, {"quantization": NF4}, "", "model.quantization", NF4_LINE),
        (IN_4_BITS, {"quantization": QuantizationSection()}, "fsdp2", "model.name", "Launch with ddp.yaml"),
        (None, {"quantization": NF4}, "fsdp2", None, None),
        ({"quant_method": "fp8"}, {}, "fsdp2", None, None),
        (IN_4_BITS, {"quantization": QuantizationSection()}, "ddp", None, None),
        (IN_8_BITS, {"quantization": QuantizationSection(bits=8)}, "ddp", None, None),
    ],
)
def test_stored_weights_that_cannot_be_trained_as_requested_are_refused_by_name(
    tmp_path, stored, keys, strategy, key, message
):
    write_config(tmp_path, stored)
    section = ModelSection(name=str(tmp_path), **keys)
    problems = list(stored_problems(load_pretrained_config(section), section, strategy=strategy))
    assert [problem.key for problem in problems] == ([] if key is None else [key])
    assert all(message in problem.message for problem in problems)
