import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from finetune.commands.serving_files import write_serving_files
from finetune.commands.verify.expected import ExpectedModel, ServingError, compute_expected
from finetune.commands.verify.openai_client import OpenAIModel
from finetune.commands.verify.serving import LlamaCppModel, ServingOptions, compare_served, run_serving
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from finetune.data.templates.chat_template import stop_ids
from finetune.export.engines import ENGINES
from finetune.export.gguf import _LLAMA3, ARCHITECTURES, write_gguf
from finetune.model.loading.saved import inspect_model_folder
from tests.export.test_gguf import split_by
from tests.serving_folders import FAMILIES, SIZES, make_model, make_sentencepiece_tokenizer, make_tokenizer, save
from tests.serving_server import ServedFolder, running
from tests.small_job import conversation, write_job, write_rows


@pytest.mark.full
@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_a_clean_family_has_no_problem(model_type, tmp_path, tokenizer, verify):
    model = make_model(model_type, vocabulary_size=len(tokenizer))
    comparison = verify(save(model, tokenizer, tmp_path / "final"))
    assert comparison.problems == []
    assert comparison.measurements["prompts"] == {"compared": 3, "different": 0}
    assert comparison.measurements["log-probabilities"]["rows"] == 64
    assert comparison.measurements["answers"]["same"] == 3


def test_a_clean_adapter_changes_the_base_as_training_did(adapter, verify):
    comparison = verify(adapter)
    assert comparison.problems == []
    assert comparison.measurements["effect of training"]["served part"] == pytest.approx(1, abs=1e-3)
    assert comparison.measurements["effect of training"]["size"] > 0.1


def test_an_engine_in_bfloat16_is_allowed_the_rounding_of_bfloat16(full, verify):
    comparison = verify(full, dtype=torch.bfloat16, expected_dtype="bfloat16")
    assert comparison.problems == []
    assert comparison.measurements["log-probabilities"]["median"] > 1e-3


def test_the_report_is_written_next_to_the_folder(full, tokenizer, tmp_path, capsys):
    """The base has another seed, so that the served model differs from it as the folder's does."""
    base = save(make_model("llama", vocabulary_size=len(tokenizer), seed=1), tokenizer, tmp_path / "base")
    with running(ServedFolder(full)) as url:
        assert run_serving(full, ServingOptions(f"vllm:{url}", base=base))
    report = json.loads((full.parent / "serving.json").read_text())
    assert (report["folder"], report["problems"], report["not compared"]) == (str(full), [], [])
    assert report["effect of training"]["served part"] == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "log-probabilities of 16,320 tokens in 64 rows" in printed
    assert "answers end at <|endoftext|> (0), <|im_end|> (2)" in printed
    assert f"verified; details in {full.parent / 'serving.json'}" in printed


def test_a_server_that_only_chats_is_compared_by_its_answers(full, tmp_path):
    """As Ollama is: without tokens, rows and forced tokens."""
    served = ServedFolder(full)

    def answer(path: str, body: dict[str, Any]) -> Any:
        return 404 if path in ("/tokenize", "/v1/completions") else served(path, body)

    with running(answer) as url:
        model = OpenAIModel(ENGINES["ollama"], url, timeout_seconds=60.0)
        model.choose(None, folder=full)
        expected = compute_expected(
            inspect_model_folder(full, key="folder"), base=None, rows=None, dtype=None, trust_remote_code=False
        )
        comparison = compare_served(model, expected)
    assert comparison.problems == []
    assert comparison.measurements == {"answers": {"same": 3, "chosen by rounding": 0, "different": 0}}
    assert len(comparison.not_compared) == 3
    served.model.model.norm.weight.data *= 1.001
    with running(answer) as url:
        model = OpenAIModel(ENGINES["ollama"], url, timeout_seconds=60.0)
        model.choose(None, folder=full)
        assert "has the log-probability" in "\n".join(compare_served(model, expected).problems)


def test_a_server_without_log_probabilities_is_refused_before_anything_is_computed(full, capsys):
    """As `transformers serve` is: it takes no token ids, and its answers show no weights."""
    served = ServedFolder(full)

    def answer(path: str, body: dict[str, Any]) -> Any:
        result = 422 if path == "/v1/completions" else served(path, body)
        if result == 422:
            return result
        for choice in result.get("choices", ()):
            choice["logprobs"] = None
        return result

    with running(answer) as url, pytest.raises(ServingError, match="reports no log-probabilities"):
        run_serving(full, ServingOptions(f"openai:{url}"))
    assert "computing" not in capsys.readouterr().out


def test_rows_and_prompts_are_those_of_the_run(full, tmp_path):
    run = shutil.copytree(full.parent, tmp_path / "run")
    (run / "resolved.yaml").write_text(resolved_yaml(load_config(write_job(tmp_path))))
    model = ExpectedModel(inspect_model_folder(run / "final", key="folder"), base=None, trust_remote_code=False)
    inputs = model.inputs(None)
    assert inputs.origin == "rows of run"
    assert (len(inputs.rows), len(inputs.prompts)) == (64, 8)
    first = json.loads((tmp_path / "held_out.jsonl").read_text().splitlines()[0])["messages"]
    assert f"{first[1]['content']}<|im_end|>" in model.tokenizer.decode(inputs.rows[0])
    assert model.tokenizer.decode(inputs.prompt_ids[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")
    (tmp_path / "held_out.jsonl").unlink()
    assert "synthetic rows, because the data of run cannot be read" in model.inputs(None).origin


def test_rows_of_a_file_come_first(full, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [conversation(f"Say {number}", f"It is {number}") for number in range(3)])
    model = ExpectedModel(inspect_model_folder(full, key="folder"), base=None, trust_remote_code=False)
    inputs = model.inputs(tmp_path / "rows.jsonl")
    assert "It is 0<|im_end|>" in model.tokenizer.decode(inputs.rows[0])
    assert inputs.prompts[2] == [{"role": "user", "content": "Say 2"}]
    assert (len(inputs.rows), len(inputs.prompts)) == (64, 6)


needs_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="the extra `gguf` compiles llama.cpp, which CI does not"
)

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


@needs_llama_cpp
@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_llama_cpp_serves_the_folder_in_float16(model_type, tmp_path):
    tokenizer = make_tokenizer()
    values = OTHERS.get(model_type, FAMILIES.get(model_type))
    assert values is not None
    model = make_model(model_type, vocabulary_size=len(tokenizer), **values)
    folder = written(tmp_path / "final", model, tokenizer)
    report = report_of(folder)
    assert (report["problems"], report["log-probabilities"]["dtype"]) == ([], "float16")
    assert report["log-probabilities"]["median"] < 3e-3


@needs_llama_cpp
@pytest.mark.parametrize("name", list(SCALED))
def test_scaled_positions_are_served_as_trained(name, tmp_path):
    tokenizer = make_tokenizer()
    model_type, values = SCALED[name]
    rope = {"rope_type": name, "rope_theta": 10000.0, **values}
    model = make_model(model_type, vocabulary_size=len(tokenizer), rope_parameters=rope)
    assert report_of(written(tmp_path / "final", model, tokenizer))["problems"] == []


@needs_llama_cpp
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


@needs_llama_cpp
@pytest.mark.parametrize("make", [sentencepiece, llama_3, qwen_2])
def test_texts_and_prompts_have_the_same_tokens(make: Callable[[], Any], tmp_path):
    tokenizer = make()
    report = report_of(written(tmp_path / "final", make_model("llama", vocabulary_size=len(tokenizer)), tokenizer))
    assert report["problems"] == []
    assert report["texts"] == {"compared": 32, "different": 0}


@needs_llama_cpp
def test_another_model_in_the_file_is_reported(tmp_path):
    tokenizer = make_tokenizer()
    folder = written(tmp_path / "final", make_model("llama", vocabulary_size=len(tokenizer)), tokenizer)
    other = written(tmp_path / "other", make_model("llama", vocabulary_size=len(tokenizer), seed=1), tokenizer)
    shutil.copy(other / "model-f16.gguf", folder / "model-f16.gguf")
    assert "exceeded in 64 of 64 rows" in "\n".join(report_of(folder)["problems"])


@needs_llama_cpp
def test_a_folder_without_or_with_several_files_is_one_message(tmp_path):
    with pytest.raises(ServingError, match=r"reads one GGUF file, but .* has none"):
        LlamaCppModel(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ServingError, match=r"llama.cpp cannot load .*a\.gguf"):
        LlamaCppModel(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ServingError, match=r"has a\.gguf, b\.gguf"):
        LlamaCppModel(tmp_path)


@needs_llama_cpp
def test_an_export_for_ollama_has_a_modelfile_for_its_weights(full, tmp_path):
    folder = shutil.copytree(full, tmp_path / "support" / "final")
    files = write_serving_files(folder, ENGINES["ollama"], gguf_type="f16", trust_remote_code=False)
    assert [file.name for file in files] == ["support-f16.gguf", "Modelfile", "serve-ollama.txt"]
    lines = (folder / "Modelfile").read_text().splitlines()
    assert lines == ["FROM ./support-f16.gguf", "PARAMETER num_ctx 512", *STOPS]
    assert report_of(folder)["problems"] == []


STOPS = ['PARAMETER stop "<|endoftext|>"', 'PARAMETER stop "<|im_end|>"']
