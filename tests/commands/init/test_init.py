import pytest
import torch
from transformers import LlamaConfig

from finetune.commands.init.init import make_recipe, recipes
from finetune.config.load import load_config
from finetune.errors import UserError
from tests.small_models import byte_tokenizer


def test_the_quickstart_brings_its_data_and_writing_it_again_makes_missing_files_alone(tmp_path):
    paths = make_recipe("quickstart", tmp_path)
    assert [path.name for path in paths] == ["job.yaml", "train.jsonl", "held_out.jsonl"]
    job, train, held_out = paths
    content, before = train.read_bytes(), [path.stat().st_mtime_ns for path in (job, held_out)]
    train.unlink()
    (tmp_path / "runs").mkdir()  # what a run left there is nobody's business
    assert make_recipe("quickstart", tmp_path) == paths
    assert train.read_bytes() == content and [path.stat().st_mtime_ns for path in (job, held_out)] == before


def test_a_changed_job_is_never_overwritten(tmp_path):
    (tmp_path / "job.yaml").write_text("mine\n")
    with pytest.raises(UserError, match=r"already holds job\.yaml with different content.*--into"):
        make_recipe("quickstart", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["quikstart", "../errors", "sub/quickstart", ""])
def test_an_unknown_recipe_is_answered_with_the_list(tmp_path, name):
    with pytest.raises(UserError, match=rf"Unknown recipe `{name}`\. Available: .*quickstart"):
        make_recipe(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_recipe_has_a_description_of_one_sentence():
    told = recipes()
    assert set(told) >= {"quickstart", "sft-lora", "sft-full", "sft-jsonl", "pretrain"}
    for sentence in told.values():
        assert 20 < len(sentence) < 160 and sentence.endswith(".")


@pytest.fixture(params=["instruct", "base"])
def pretrained(request, tmp_path):
    """A folder with the config and tokenizer of a pretrained model, and no weights."""
    folder = tmp_path / request.param
    LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=64).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    if request.param == "instruct":
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("has_gpu", [False, True])
def test_the_quickstart_is_written_for_a_pretrained_model(pretrained, tmp_path, monkeypatch, capsys, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_gpu)
    monkeypatch.chdir(tmp_path)  # a bare name of a folder here is the folder
    paths = make_recipe("quickstart", tmp_path / "quickstart", model=pretrained.name)
    assert [path.name for path in paths] == ["job.yaml", "train.jsonl", "held_out.jsonl"]
    config = load_config(paths[0]).config
    assert config.model.name == str(pretrained) and config.model.lora is not None
    has_own = pretrained.name == "instruct"
    assert config.data.chat_template == (None if has_own else "chatml")
    assert ("the model's own" if has_own else "chatml, because the model has none") in capsys.readouterr().out
    assert (config.model.dtype, config.train.precision) == (("bfloat16", "bf16") if has_gpu else ("float32", "fp32"))
    assert config.train.learning_rate == 1e-3


def test_a_large_model_gets_a_smaller_learning_rate(pretrained, tmp_path):
    LlamaConfig(hidden_size=2048).save_pretrained(pretrained)
    job = make_recipe("quickstart-pretrained", tmp_path / "quickstart", model=str(pretrained))[0]
    assert load_config(job).config.train.learning_rate == 2e-4


def test_a_model_is_for_the_quickstart_alone_and_must_be_one(tmp_path):
    with pytest.raises(UserError, match=r"--model: `sft-lora` names its own model"):
        make_recipe("sft-lora", tmp_path / "job", model="some/model")
    with pytest.raises(UserError, match=r"--model \./none: .*none does not exist"):
        make_recipe("quickstart", tmp_path / "job", model="./none")
    file = tmp_path / "tiny.Q4_1.gguf"
    file.touch()
    with pytest.raises(UserError, match=r"--model .*tiny\.Q4_1\.gguf is a GGUF file.*\n.*python -c"):
        make_recipe("quickstart", tmp_path / "job", model=str(file))
    assert not (tmp_path / "job").exists()
