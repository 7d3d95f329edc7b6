import json
import shutil
from typing import Any

import pytest
import torch

from finetune.commands.verify.serving.expected import ExpectedModel, compute_expected
from finetune.commands.verify.serving.openai_client import OpenAIModel
from finetune.commands.verify.serving.serving import ServingOptions, compare_served, run_serving
from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config
from finetune.export.engines import ENGINES
from finetune.model.loading.saved import inspect_model_folder
from tests.serving_folders import FAMILIES, make_model, save
from tests.serving_server import ServedFolder, running
from tests.small_job import conversation, write_job, write_rows


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_a_clean_family_has_no_problem(model_type, tmp_path, tokenizer, verify):
    model = make_model(model_type, vocabulary_size=len(tokenizer))
    comparison = verify(save(model, tokenizer, tmp_path / "final"))
    assert comparison.problems == []
    assert comparison.facts["prompts"] == {"compared": 3, "different": 0}
    assert comparison.facts["log-probabilities"]["rows"] == 64
    assert comparison.facts["answers"]["same"] == 3


def test_a_clean_adapter_changes_the_base_as_training_did(adapter, verify):
    comparison = verify(adapter)
    assert comparison.problems == []
    assert comparison.facts["effect of training"]["served part"] == pytest.approx(1, abs=1e-3)
    assert comparison.facts["effect of training"]["size"] > 0.1
    assert comparison.facts["merged"]["worst"] < 1e-4


def test_an_engine_in_bfloat16_is_allowed_the_rounding_of_bfloat16(full, verify):
    comparison = verify(full, dtype=torch.bfloat16, expected_dtype="bfloat16")
    assert comparison.problems == []
    assert comparison.facts["log-probabilities"]["median"] > 1e-3


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
    assert comparison.facts == {"answers": {"same": 3, "chosen by rounding": 0, "different": 0}}
    assert len(comparison.not_compared) == 3
    served.model.model.norm.weight.data *= 1.001
    with running(answer) as url:
        model = OpenAIModel(ENGINES["ollama"], url, timeout_seconds=60.0)
        model.choose(None, folder=full)
        assert "has the log-probability" in "\n".join(compare_served(model, expected).problems)


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
