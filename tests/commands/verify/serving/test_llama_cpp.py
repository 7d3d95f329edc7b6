"""Folders of every model type that is written as GGUF, served by llama.cpp itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands.serving_files import write_serving_files
from finetune.commands.verify.serving.llama_cpp import LlamaCppModel
from finetune.commands.verify.serving.served_model import ServingError
from finetune.commands.verify.serving.serving import ServingOptions, run_serving
from finetune.data.templates.chat_template import stop_ids
from finetune.export.engines import ENGINES
from finetune.export.gguf import _LLAMA3, ARCHITECTURES, write_gguf
from tests.export.test_gguf import split_by
from tests.serving_folders import FAMILIES, SIZES, make_model, make_sentencepiece_tokenizer, make_tokenizer, save

pytest.importorskip("gguf", reason="the extra `gguf` writes these files")
pytest.importorskip("llama_cpp", reason="the extra `gguf` compiles llama.cpp, which CI does not")

OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {**SIZES, "head_dim": 16},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}
SCALED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": (
        "llama",
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128},
    ),
    "linear": ("llama", {"factor": 4.0}),
    "yarn": ("qwen3", {"factor": 4.0, "original_max_position_embeddings": 128}),
}
NUM_GREEDY = 200


def written(folder: Path, model: Any, tokenizer: Any, *, dtype: str = "f16") -> Path:
    save(model, tokenizer, folder)
    write_gguf(
        folder,
        folder / f"model-{dtype}.gguf",
        tokenizer=AutoTokenizer.from_pretrained(folder),
        stop_ids=stop_ids(tokenizer),
        dtype=dtype,  # type: ignore[arg-type]
    )
    return folder


def report_of(folder: Path) -> dict[str, Any]:
    run_serving(folder, ServingOptions("llama.cpp"))
    report: dict[str, Any] = json.loads((folder.parent / "serving.json").read_text())
    return report


def num_greedy_tokens_that_agree(folder: Path) -> tuple[int, float]:
    """Return how many of 200 greedy tokens llama.cpp chooses as transformers does in float32, and the largest error."""
    served = LlamaCppModel(folder)
    served.prepare({}, num_tokens=300)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(AutoTokenizer.from_pretrained(folder)("The quick brown fox jumps over the lazy dog,")["input_ids"])
    generated = model.generate(
        torch.tensor([ids]), max_new_tokens=NUM_GREEDY, min_new_tokens=NUM_GREEDY, do_sample=False
    )
    row = generated[0].tolist()
    logits = served._logits(row)[len(ids) - 1 : -1].log_softmax(-1)
    with torch.no_grad():
        expected = model(generated).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    chosen = torch.tensor(row[len(ids) :])
    index = torch.arange(NUM_GREEDY)
    ends = sorted(stop_ids(AutoTokenizer.from_pretrained(folder)))
    logits[:, ends] = -torch.inf  # generation was forced to go on
    error = (logits[index, chosen] - expected[index, chosen]).abs().max()
    return int((logits.argmax(-1) == chosen).sum()), float(error)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_llama_cpp_serves_the_folder_in_float16(model_type, tmp_path, record_property):
    tokenizer = make_tokenizer()
    values = OTHERS.get(model_type, FAMILIES.get(model_type))
    assert values is not None
    model = make_model(model_type, vocabulary_size=len(tokenizer), **values)
    folder = written(tmp_path / "final", model, tokenizer)
    report = report_of(folder)
    assert (report["problems"], report["log-probabilities"]["dtype"]) == ([], "float16")
    assert report["log-probabilities"]["median"] < 3e-3
    num_equal, error = num_greedy_tokens_that_agree(folder)
    print(f"{model_type}: {num_equal} of {NUM_GREEDY} greedy tokens, log-probabilities within {error:.1e}")
    assert num_equal >= NUM_GREEDY - 2  # of two tokens that are nearly as likely, rounding may choose the other one


@pytest.mark.parametrize("name", list(SCALED))
def test_scaled_positions_are_served_as_trained(name, tmp_path):
    tokenizer = make_tokenizer()
    model_type, values = SCALED[name]
    rope = {"rope_type": name, "rope_theta": 10000.0, **values}
    model = make_model(model_type, vocabulary_size=len(tokenizer), rope_parameters=rope)
    assert report_of(written(tmp_path / "final", model, tokenizer))["problems"] == []


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe"])
def test_llama_cpp_serves_the_folder_in_8_bits(model_type, tmp_path):
    tokenizer = make_tokenizer()
    model = make_model(model_type, vocabulary_size=len(tokenizer))
    report = report_of(written(tmp_path / "final", model, tokenizer, dtype="q8_0"))
    assert (report["problems"], report["log-probabilities"]["dtype"]) == ([], "q8_0")


def sentencepiece() -> Any:
    return make_sentencepiece_tokenizer()


def llama_3() -> Any:
    made = make_tokenizer()
    made.backend_tokenizer.pre_tokenizer = split_by(_LLAMA3)
    return made


def qwen_2() -> Any:
    made = make_tokenizer(bos=None)
    made.backend_tokenizer.pre_tokenizer = split_by(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"))
    return made


@pytest.mark.parametrize("make", [sentencepiece, llama_3, qwen_2])
def test_texts_and_prompts_have_the_same_tokens(make: Callable[[], Any], tmp_path):
    tokenizer = make()
    report = report_of(written(tmp_path / "final", make_model("llama", vocabulary_size=len(tokenizer)), tokenizer))
    assert report["problems"] == []
    assert report["texts"] == {"compared": 32, "different": 0}


def test_another_model_in_the_file_is_reported(tmp_path):
    tokenizer = make_tokenizer()
    folder = written(tmp_path / "final", make_model("llama", vocabulary_size=len(tokenizer)), tokenizer)
    other = written(tmp_path / "other", make_model("llama", vocabulary_size=len(tokenizer), seed=1), tokenizer)
    shutil.copy(other / "model-f16.gguf", folder / "model-f16.gguf")
    assert "exceeded in 64 of 64 rows" in "\n".join(report_of(folder)["problems"])


def test_a_folder_without_or_with_several_files_is_one_message(tmp_path):
    with pytest.raises(ServingError, match=r"reads one GGUF file, but .* has none"):
        LlamaCppModel(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ServingError, match=r"llama.cpp cannot load .*a\.gguf"):
        LlamaCppModel(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ServingError, match=r"has a\.gguf, b\.gguf"):
        LlamaCppModel(tmp_path)


def test_an_export_for_ollama_has_a_modelfile_for_its_weights(full, tmp_path):
    folder = shutil.copytree(full, tmp_path / "support" / "final")
    files = write_serving_files(folder, ENGINES["ollama"], gguf_type="f16", trust_remote_code=False)
    assert [file.name for file in files] == ["support-f16.gguf", "Modelfile", "serve-ollama.txt"]
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines == ["FROM ./support-f16.gguf", "PARAMETER num_ctx 512", *STOPS]
    assert report_of(folder)["problems"] == []


STOPS = ['PARAMETER stop "<|endoftext|>"', 'PARAMETER stop "<|im_end|>"']
