"""What `finetune export --for` writes next to the weights, and which adapters must be merged first."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from finetune.commands.serving_files import export_for, write_serving_files
from finetune.errors import ModelError, UserError
from finetune.export.engines import ENGINES, Engine, find_engine
from finetune.export.upstream import write_generation_config
from tests.serving_folders import make_model, make_tokenizer, save

NOTHING = {"step": None, "to": None, "dtype": None, "merge": False, "push_to_hub": None, "public": False}
OPTIONS: dict[str, Any] = {**NOTHING, "trust_remote_code": False, "verify": None, "gguf_type": "f16"}


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    tokenizer = make_tokenizer()
    model = make_model("llama", vocabulary_size=len(tokenizer))
    return save(model, tokenizer, tmp_path_factory.mktemp("runs") / "support" / "final")


@pytest.fixture(scope="module")
def adapter(full, tmp_path_factory) -> Path:
    """An adapter of rank 24 on attention, as `final/` of a run."""
    folder = tmp_path_factory.mktemp("runs") / "support" / "final"
    tokenizer = make_tokenizer()
    base = make_model("llama", vocabulary_size=len(tokenizer))
    base.name_or_path = str(full)
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=24, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(full, tmp_path) -> Path:
    return shutil.copytree(full.parent, tmp_path / "support") / "final"


def write(folder: Path, engine: str) -> list[str]:
    """Write the files, and return the lines of the one with the commands."""
    files = write_serving_files(folder, ENGINES[engine], gguf_type="f16", trust_remote_code=False)
    return files[-1].read_text().splitlines()


def test_the_final_folder_of_a_run_is_used_as_it_is(copy, capsys):
    assert export_for(copy.parent, "vllm", **OPTIONS) == copy
    printed = capsys.readouterr().out
    assert printed.startswith(f"written for vLLM: serve-vllm.txt in {copy}\n")
    assert f"vllm serve {copy} --served-model-name support --dtype float32\n" in printed
    assert f"finetune verify serving {copy} --engine vllm\n" in printed


def test_sglang_gets_its_command(copy):
    command = "python -m sglang.launch_server --model-path {} --served-model-name support --dtype float32"
    assert command.format(copy) in write(copy, "sglang")


def test_an_adapter_is_served_with_its_own_tokenizer_template_and_stops(adapter, full):
    _, command, *_ = write(adapter, "vllm")
    words = shlex.split(command)
    assert words[:3] == ["vllm", "serve", str(full)]
    options = dict(zip(words[3::2], words[4::2], strict=False)) | {"--enable-lora": ""}
    assert (options["--tokenizer"], options["--generation-config"]) == (str(adapter), str(adapter))
    assert options["--chat-template"] == str(adapter / "chat_template.jinja")
    assert "--max-lora-rank 32 --lora-modules support=" in command
    words = shlex.split(write(adapter, "sglang")[1])
    assert json.loads(words[words.index("--json-model-override-args") + 1]) == {"eos_token_id": [0, 2]}


def test_a_generation_config_without_the_ends_of_answers_is_completed(copy):
    contradictory = GenerationConfig(eos_token_id=0, temperature=0.5)  # without do_sample, as Llama 2 has it
    write_generation_config(contradictory, copy)
    files = write_serving_files(copy, ENGINES["vllm"], gguf_type="f16", trust_remote_code=False)
    assert [file.name for file in files] == ["generation_config.json", "serve-vllm.txt"]
    config = GenerationConfig.from_pretrained(copy)
    assert (config.eos_token_id, config.temperature) == ([0, 2], 0.5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_parameters": ["experts.down_proj"]}, "vLLM silently ignores `target_parameters`"),
        ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}}, "ignores `rank_pattern`; vLLM silently"),
        ({"modules_to_save": ["lm_head"]}, "vLLM does not support `modules_to_save`"),
        ({"use_dora": True}, "vLLM does not support `use_dora`"),
        ({"bias": "all"}, "does not support trained biases"),
        ({"r": 600}, "its rank of 600 is above the largest limit, 512"),
        ({"peft_type": "IA3"}, "does not serve adapters of the type IA3"),
    ],
)
def test_an_adapter_that_vllm_would_serve_otherwise_must_be_merged(adapter, tmp_path, changes, problem):
    folder = shutil.copytree(adapter, tmp_path / "final")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError) as caught:
        write(folder, "vllm")
    assert problem in str(caught.value)
    assert str(caught.value).endswith(f"Run: finetune export {folder} --merge --for vllm")


def test_llama_cpp_and_ollama_need_a_merged_model(adapter):
    for engine in ("llama.cpp", "ollama"):
        with pytest.raises(UserError, match="serves full models"):
            write(adapter, engine)


def test_merging_for_an_engine_writes_a_full_model_with_its_files(adapter, full, tmp_path):
    folder = export_for(adapter, "vllm", **{**OPTIONS, "merge": True, "to": tmp_path / "merged", "verify": False})
    assert (folder / "serve-vllm.txt").read_text().startswith(f"vllm serve {folder} ")
    assert not (folder / "adapter_config.json").exists()


def test_a_model_that_cannot_be_written_as_gguf_is_one_message(tmp_path):
    tokenizer = make_tokenizer()
    folder = save(
        make_model("gpt2", vocabulary_size=len(tokenizer), n_layer=1, n_embd=8, n_head=2), tokenizer, tmp_path
    )
    pytest.importorskip("gguf", reason="the extra `gguf` writes these files")
    with pytest.raises(ModelError, match=r"convert_hf_to_gguf\.py"):
        write(folder, "llama.cpp")


def test_an_unknown_engine_lists_those_of_the_option():
    with pytest.raises(UserError, match=r"--for openai: .* vllm, sglang, llama\.cpp, ollama"):
        find_engine("openai", option="--for")
    assert isinstance(find_engine("openai", option="--engine"), Engine)
