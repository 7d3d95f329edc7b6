"""GGUF files, read again by the `gguf` package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.errors import ModelError
from finetune.export.gguf import (
    _LLAMA3,
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    convert_tokenizer,
    find_architecture,
    metadata,
    rope_divisors,
    write_gguf,
)
from tests.refusals import refused
from tests.serving_folders import FAMILIES, SIZES, make_model, make_sentencepiece_tokenizer, make_tokenizer, save

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def config_of(model_type: str, **values):
    return AutoConfig.for_model(model_type, **{**FAMILIES.get(model_type, SIZES), **values})


def test_divisors_of_llama_3_are_those_of_transformers():
    config = config_of("llama", rope_parameters=LLAMA3)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert torch.allclose(plain / torch.tensor(rope_divisors(config)), scaled, rtol=1e-6)
    assert rope_divisors(config_of("llama")) is None


def test_scaled_positions_are_in_the_metadata():
    config = config_of("qwen3", rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0})
    values = metadata(find_architecture(config), config)
    assert (values["rope.scaling.type"], values["rope.scaling.factor"], values["rope.freq_base"]) == (
        "linear",
        4.0,
        5e5,
    )


@pytest.mark.parametrize(
    ("model_type", "values", "fact"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "`dynamic`"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "`query_pre_attn_scalar` is 24"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "64"),
        ("mistral", {"sliding_window": 128}, "128"),
        ("bert", {}, "`bert`"),
    ],
)
def test_a_model_that_llama_cpp_computes_otherwise_is_refused(model_type, values, fact):
    with refused(ModelError, fact):
        find_architecture(config_of(model_type, **values))


def test_a_window_longer_than_the_context_is_no_window():
    assert find_architecture(config_of("mistral", sliding_window=512)).name == "llama"


def with_pre_tokenizer(pre_tokenizer: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    made = make_tokenizer()
    made.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return made


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def converted(tokenizer: PreTrainedTokenizerFast, *, vocabulary_size: int = 402):
    return convert_tokenizer(tokenizer, stop_ids={0, 2}, vocabulary_size=vocabulary_size)


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (split_by(_LLAMA3), "dbrx"),
        (split_by(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")), "qwen2"),
        (
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
            "smollm",
        ),
    ],
)
def test_a_known_pre_tokenizer_has_llama_cpps_name(pre_tokenizer, name):
    assert converted(with_pre_tokenizer(pre_tokenizer))["pre"] == name


def test_whole_words_that_skip_the_merges_are_llama_3s():
    made = with_pre_tokenizer(split_by(_LLAMA3))
    content = json.loads(made.backend_tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    made._tokenizer = Tokenizer.from_str(json.dumps(content))
    assert converted(made)["pre"] == "llama-bpe"


@pytest.mark.parametrize("pre_tokenizer", [split_by(r"\d+"), pre_tokenizers.Whitespace()])
def test_an_unknown_pre_tokenizer_is_refused(pre_tokenizer):
    with refused(ModelError):
        converted(with_pre_tokenizer(pre_tokenizer))


def test_embeddings_without_a_token_are_unused():
    made = converted(make_tokenizer(), vocabulary_size=410)
    types = made["token_type"]
    assert (types[-1], made["tokens"][-1]) == (UNUSED, "[PAD409]")
    assert (types[0], types[4], types[6]) == (CONTROL, CONTROL, NORMAL)


def test_pieces_of_sentencepiece_have_scores_in_the_order_of_their_merges():
    tokenizer = make_sentencepiece_tokenizer()
    made = converted(tokenizer, vocabulary_size=len(tokenizer))
    assert (made["model"], "merges" in made, made["add_space_prefix"]) == ("llama", False, True)
    types = dict(zip(made["tokens"], made["token_type"], strict=True))
    assert (types["<0x0A>"], types["<unk>"]) == (BYTE, UNKNOWN)
    score = dict(zip(made["tokens"], made["scores"], strict=True))
    merges = [tuple(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    first, last = "".join(merges[0]), "".join(merges[-1])
    assert score[first] > score[last] > score["<unk>"]


def test_pieces_without_all_of_their_merges_are_refused():
    """llama.cpp would merge `a` and `bc`, this tokenizer only `ab` and `c`."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", "a", "b", "c", "ab", "bc", "abc"])}
    model = models.BPE(
        vocab=vocabulary, merges=[("a", "b"), ("b", "c"), ("ab", "c")], byte_fallback=True, unk_token="<unk>"
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.ByteFallback()
    with refused(ModelError, "(a + bc)"):
        converted(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), vocabulary_size=7)


def test_a_word_piece_tokenizer_is_refused():
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    with refused(ModelError, "WordPiece"):
        converted(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_more_ends_than_llama_cpp_has_keys_for_are_refused():
    with refused(ModelError, "4 tokens"):
        convert_tokenizer(make_tokenizer(), stop_ids={0, 2, 5, 6}, vocabulary_size=402)


gguf = pytest.importorskip("gguf", reason="the extra `gguf` writes these files")


def written(folder: Path, model_type: str, *, dtype: str = "f16", **values: Any) -> tuple[Any, dict[str, Any]]:
    """Return the reader of the file, and its tensors by name."""
    tokenizer = make_tokenizer()
    save(make_model(model_type, vocabulary_size=len(tokenizer), **values), tokenizer, folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    write_gguf(folder, folder / "model.gguf", tokenizer=loaded, stop_ids={0, 2}, dtype=dtype)  # type: ignore[arg-type]
    reader = gguf.GGUFReader(folder / "model.gguf")
    assert [path.name for path in folder.glob("*.part")] == []
    return reader, {tensor.name: tensor for tensor in reader.tensors}


def test_matrices_are_written_in_float16_and_vectors_in_float32(tmp_path):
    _, tensors = written(tmp_path, "qwen2")
    own = load_file(tmp_path / "model.safetensors")
    down = tensors["blk.1.ffn_down.weight"]
    assert torch.equal(torch.tensor(np.array(down.data)), own["model.layers.1.mlp.down_proj.weight"].half())
    assert torch.equal(
        torch.tensor(np.array(tensors["blk.0.attn_q.bias"].data)), own["model.layers.0.self_attn.q_proj.bias"]
    )
    assert "output.weight" in tensors


def test_a_tied_head_is_written_once(tmp_path):
    _, tensors = written(tmp_path, "qwen3")
    assert "token_embd.weight" in tensors
    assert "output.weight" not in tensors


def test_rows_of_llama_queries_are_reordered_for_neighboring_pairs(tmp_path):
    _, tensors = written(tmp_path, "llama")
    own = load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].half()
    rows = torch.tensor(np.array(tensors["blk.0.attn_q.weight"].data))
    assert torch.equal(rows[:4], own[[0, 8, 1, 9]])  # 4 heads of 16 dimensions
    assert torch.equal(rows[16:18], own[[16, 24]])


def test_experts_are_stacked(tmp_path):
    _, tensors = written(tmp_path, "qwen3_moe")
    own = load_file(tmp_path / "model.safetensors")
    stacked = torch.tensor(np.array(tensors["blk.1.ffn_up_exps.weight"].data))
    assert torch.equal(stacked[2], own["model.layers.1.mlp.experts.2.up_proj.weight"].half())
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_eight_bits_are_within_about_half_a_step_of_their_block(tmp_path):
    _, tensors = written(tmp_path, "qwen2", dtype="q8_0")
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.Q8_0
    own = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].reshape(-1, 32)
    read = torch.tensor(gguf.quants.dequantize(down.data, down.tensor_type)).reshape(-1, 32)
    assert ((read - own).abs() <= own.abs().amax(1, keepdim=True) / 127 * 0.6).all()  # the scale is rounded, too


def test_a_weight_beyond_float16_keeps_its_matrix_in_float32(tmp_path):
    tokenizer = make_tokenizer()
    model = make_model("qwen2", vocabulary_size=len(tokenizer))
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1e5
    save(model, tokenizer, tmp_path)
    write_gguf(
        tmp_path, tmp_path / "m.gguf", tokenizer=AutoTokenizer.from_pretrained(tmp_path), stop_ids={0}, dtype="f16"
    )
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert tensors["blk.0.ffn_down.weight"].data[0, 0] == np.float32(1e5)


def test_tokens_template_and_ends_of_answers_are_in_the_file(tmp_path):
    reader, _ = written(tmp_path, "llama")
    values = {name: field.contents() for name, field in reader.fields.items()}
    assert values["tokenizer.ggml.tokens"][:5] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|pad|>",
        "<|begin|>",
    ]
    ids = {key: values[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "eot", "padding")}
    assert ids == {"bos": 4, "eos": 0, "eot": 2, "padding": 3}
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.chat_template"].startswith("{{ bos_token }}")
    assert (values["llama.block_count"], values["llama.attention.head_count_kv"]) == (2, 2)


def test_an_unknown_model_is_refused_with_the_converters_command_and_leaves_no_file(tmp_path):
    with refused(ModelError, "`gpt2`", "convert_hf_to_gguf.py"):
        written(tmp_path, "gpt2")
    assert list(tmp_path.glob("*.gguf*")) == []
