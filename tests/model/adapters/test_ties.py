"""Embeddings and head that are tied stay tied under every adapter, or the adapter is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from finetune.config.sections.model import LoraSection, PeftSection
from finetune.errors import ModelError
from finetune.export.merge import merge
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from tests.refusals import refused

SIZE, WIDTH = 40, 16
SIZES = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
MODELS = {  # class, config, a linear layer, embeddings (the first is named in jobs), head
    "qwen3": (
        AutoModelForCausalLM,
        {**SIZES, "head_dim": 8, "num_key_value_heads": 2, "tie_word_embeddings": True},
        "q_proj",
        ("model.embed_tokens",),
        "lm_head",
    ),
    "gpt2": (
        AutoModelForCausalLM,
        {"n_embd": WIDTH, "n_layer": 1, "n_head": 2},
        "c_attn",
        ("transformer.wte",),
        "lm_head",
    ),
    "bert": (
        AutoModelForMaskedLM,
        SIZES,
        "query",
        ("bert.embeddings.word_embeddings",),
        "cls.predictions.decoder",
    ),
    "t5": (
        AutoModelForSeq2SeqLM,
        {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
        "q",
        ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
        "lm_head",
    ),
    "bart": (
        AutoModelForSeq2SeqLM,
        {"d_model": WIDTH, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, **BART},
        "q_proj",
        ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        "lm_head",
    ),
}
WAYS = {  # of an embedding, a head and a linear layer: keys of `model.lora`
    "nothing tied": lambda embedding, head, linear: {},
    "saved embedding": lambda embedding, head, linear: {"modules_to_save": (embedding,)},
    "saved head": lambda embedding, head, linear: {"modules_to_save": (head,)},
    "saved both": lambda embedding, head, linear: {"modules_to_save": (embedding, head)},
    "adapted embedding": lambda embedding, head, linear: {"target_modules": (linear, embedding)},
    "adapted head": lambda embedding, head, linear: {"target_modules": (linear, head)},
    "adapted both": lambda embedding, head, linear: {"target_modules": (linear, embedding, head)},
    "head adapted and saved": lambda embedding, head, linear: {
        "target_modules": (linear, head),
        "modules_to_save": (head,),
    },
    "head adapted, embedding saved": lambda embedding, head, linear: {
        "target_modules": (linear, head),
        "modules_to_save": (embedding,),
    },
}
NEW = (SIZE - 2, SIZE - 1)


def build(model_type, **values):
    auto_class, own = MODELS[model_type][:2]
    torch.manual_seed(0)
    ids = {"vocab_size": SIZE, "pad_token_id": 0, "decoder_start_token_id": 0}
    return auto_class.from_config(AutoConfig.for_model(model_type, **{**own, **ids, **values})).eval()


def tables(model, model_type):
    """Return what each embedding looks up and what the head multiplies with, [tokens, width] each."""
    *_, embeddings, head = MODELS[model_type]
    base = model.get_base_model()
    scales = [getattr(base.get_submodule(name), "embed_scale", 1.0) for name in embeddings]
    found = [
        base.get_submodule(name)(torch.arange(SIZE)) / scale for name, scale in zip(embeddings, scales, strict=True)
    ]
    multiply = base.get_submodule(head)
    return [*found, (multiply(torch.eye(WIDTH)) - multiply(torch.zeros(1, WIDTH))).T]


@torch.no_grad()
def train(model):
    """Change every trained parameter."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def last(name):
    return name.rpartition(".")[2]


@pytest.mark.parametrize("new_ids", [(), NEW], ids=["", "new-tokens"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_lora_keeps_tied_weights_tied_or_names_what_would_untie_them(model_type, way, dora, new_ids):
    _, _, linear, embeddings, head = MODELS[model_type]
    keys = {"target_modules": (linear,), **WAYS[way](last(embeddings[0]), last(head), linear)}
    section = LoraSection(rank=2, dora=dora, **keys)
    head_kind = "masked_lm" if model_type == "bert" else "causal_lm"
    model, context = build(model_type), AdapterContext(seed=1, new_ids=new_ids, head=head_kind)
    is_kept = way == "nothing tied" or (model_type == "qwen3" and way.startswith("saved"))
    if not is_kept:
        with pytest.raises(ModelError, match=rf"model\.lora\S*: .*`(\w+\.)*({last(head)}|{last(embeddings[0])})`"):
            add_adapter(model, section, context)
        return
    adapted = add_adapter(model, section, context)
    before = [table.detach() for table in tables(adapted, model_type)]
    train(adapted)
    first, *others = tables(adapted, model_type)
    assert others and all(torch.allclose(first, other, atol=1e-5) for other in others)
    changed = (first - before[0]).abs().amax(dim=1) > 0.01
    if way == "nothing tied":
        assert changed.nonzero().flatten().tolist() == list(new_ids)
    else:
        assert changed.all()
    weights = dict(adapted.state_dict())
    merged = merge(adapted, weights, dtype=None)
    assert not merged.has_untied_weights
    assert torch.allclose(merged.weights[f"{head}.weight"], first, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_the_copy_of_a_tied_weight_gets_the_gradient_that_the_weight_has_in_plain_training():
    ids = torch.arange(24).reshape(2, 12)
    plain = build("qwen3")
    plain(input_ids=ids, labels=ids).loss.backward()
    for saved in ("embed_tokens", "lm_head"):
        section = LoraSection(rank=2, target_modules=("q_proj",), modules_to_save=(saved,))
        adapted = add_adapter(build("qwen3"), section, AdapterContext(seed=1))
        adapted(input_ids=ids, labels=ids).loss.backward()
        copy = adapted.get_base_model().get_input_embeddings().modules_to_save["default"].weight
        assert torch.allclose(copy.grad, plain.lm_head.weight.grad, atol=1e-7) and copy.grad.any()


OTHERS = {
    "ia3": PeftSection(type="ia3", values={"target_modules": ["k_proj", "lm_head"], "feedforward_modules": []}),
    "oft": PeftSection(type="oft", values={"oft_block_size": 8, "target_modules": ["q_proj", "lm_head"]}),
    "peft": PeftSection(type="loha", values={"r": 2, "target_modules": ["q_proj", "lm_head"]}),
    "peft, saved": PeftSection(
        type="loha", values={"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore")
def test_other_adapters_of_a_tied_weight_are_refused_and_of_an_untied_head_accepted(kind):
    with refused(ModelError, "`model.embed_tokens`, `lm_head`"):
        add_adapter(build("qwen3"), OTHERS[kind], AdapterContext(seed=1))
    assert add_adapter(build("qwen3", tie_word_embeddings=False), OTHERS[kind], AdapterContext(seed=1))


@pytest.mark.filterwarnings("ignore")
def test_a_saved_adapter_that_unties_is_refused_and_one_that_ties_is_continued(tmp_path):
    section = LoraSection(rank=2, target_modules=("q_proj",), modules_to_save=("lm_head",))
    untied = add_adapter(build("qwen3", tie_word_embeddings=False), section, AdapterContext(seed=1))
    untied.save_pretrained(tmp_path / "untied")
    with refused(ModelError, "model.adapter", "`lm_head`"):
        add_adapter(build("qwen3"), tmp_path / "untied", AdapterContext(seed=1))
    tied = add_adapter(build("qwen3"), section, AdapterContext(seed=1))
    train(tied)
    tied.save_pretrained(tmp_path / "tied")
    continued = add_adapter(build("qwen3"), tmp_path / "tied", AdapterContext(seed=1))
    train(continued)
    embedding, head = tables(continued, "qwen3")
    assert torch.equal(embedding, head)


@pytest.mark.filterwarnings("ignore")
def test_a_module_is_not_adapted_and_trained_in_full_whether_tied_or_not():
    values = {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]}
    for key, section in {
        "lora": LoraSection(rank=2, **{name: tuple(names) for name, names in values.items()}),
        "peft.values": PeftSection(type="loha", values=values),
    }.items():
        with refused(ModelError, f"model.{key}.modules_to_save: `lm_head`"):
            add_adapter(build("qwen3", tie_word_embeddings=False), section, AdapterContext(seed=1))
