"""GGUF files, read again by the `gguf` package."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from finetune.errors import ModelError
from finetune.export.gguf.write import write_gguf
from tests.serving_folders import make_model, make_tokenizer, save

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
    with pytest.raises(ModelError, match=r"(?s)`gpt2` models are not among .*convert_hf_to_gguf\.py"):
        written(tmp_path, "gpt2")
    assert list(tmp_path.glob("*.gguf*")) == []
