"""A teacher is frozen, has its own dtype and the student's vocabulary, and is identified by its weights."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.config.sections.model import LoraSection, ModelSection
from finetune.config.sections.task import DistillationSection
from finetune.errors import ModelError
from finetune.model.frozen_models import base_digest, check_teacher_tokenizer, load_teacher, weights_digest
from tests.refusals import refused


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "tiny"
    place.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "config.json"):
        (place / name).write_bytes(name.encode() * 1000)
    (place / "README.md").write_text("of no consequence")
    return place


def digest(folder, *, log=lambda _: None, model=None, **section):
    return base_digest(ModelSection(name=str(folder), **{"lora": LoraSection(), **section}), model=model, log=log)


def test_the_digest_of_a_folder_is_the_sha256_of_its_sha256sum_listing(folder):
    files = ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]
    listed = "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files)
    assert digest(folder) == f"sha256 {hashlib.sha256(listed.encode()).hexdigest()}"


@pytest.mark.parametrize("name", ["model-2.safetensors", "config.json", "model.safetensors.index.json"])
def test_a_changed_byte_changes_the_digest_of_the_base(folder, name):
    before = digest(folder)
    content = bytearray((folder / name).read_bytes())
    content[500] ^= 1
    (folder / name).write_bytes(content)
    assert digest(folder) != before


def test_files_that_are_not_loaded_do_not_count(folder):
    before = digest(folder)
    (folder / "README.md").write_text("rewritten")
    (folder / "pytorch_model.bin").write_bytes(b"the same weights in the older format")
    assert digest(folder) == before


def test_pytorch_bin_weights_are_digested_if_there_are_no_safetensors(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    without = digest(folder)
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    assert digest(folder) != without


def test_only_frozen_weights_have_a_digest(folder):
    assert digest(folder, lora=None) is None
    assert digest(folder, lora=None, freeze=("wte.*",)) is not None
    assert base_digest(ModelSection(lora=LoraSection()), model=None, log=print) is None


def test_a_hub_model_is_identified_by_its_commit():
    model = SimpleNamespace(config=SimpleNamespace(_commit_hash="c0ffee"))
    assert digest("org/model", model=model) == "commit c0ffee"


def test_a_hub_model_that_hides_its_commit_is_looked_up_in_the_cache(tmp_path):
    snapshot = tmp_path / "models--org--model" / "snapshots" / ("ab" * 20)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--org--model" / "refs").mkdir()
    (tmp_path / "models--org--model" / "refs" / "main").write_text("ab" * 20)
    assert digest("org/model", cache_folder=str(tmp_path)) == f"commit {'ab' * 20}"


def test_an_unknown_hub_commit_is_logged(tmp_path):
    messages = []
    assert digest("org/model", cache_folder=str(tmp_path), log=messages.append) == "commit unknown"
    assert "a resume would not notice a change" in messages[0]


def test_a_file_that_cannot_be_read_is_named(folder):
    (folder / "model-1.safetensors").unlink()
    (folder / "model-1.safetensors").symlink_to(folder / "nowhere")
    with refused(ModelError, "model-1.safetensors"):
        digest(folder)


MODEL = ModelSection(name="./student")


def tokenizer(*words):
    vocabulary = {word: number for number, word in enumerate(("<eos>", *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def teacher_folder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained(tmp_path)
    tokenizer("red", "green").save_pretrained(tmp_path)
    return tmp_path


def test_a_teacher_is_frozen_and_has_no_dropout(teacher_folder):
    section = DistillationSection(teacher=str(teacher_folder), teacher_dtype="bfloat16")
    teacher = load_teacher(section, model=MODEL, vocabulary_size=3, device=torch.device("cpu"))
    assert not teacher.training
    assert {(parameter.dtype, parameter.requires_grad) for parameter in teacher.parameters()} == {
        (torch.bfloat16, False)
    }


def test_a_teacher_with_another_vocabulary_is_rejected_with_one_sentence(teacher_folder):
    section = DistillationSection(teacher=str(teacher_folder))
    check_teacher_tokenizer(section, model=MODEL, tokenizer=tokenizer("red", "green"))
    with refused(ModelError, "2 tokens", "'green'"):
        check_teacher_tokenizer(section, model=MODEL, tokenizer=tokenizer("green", "red"))
    with refused(ModelError, "vocabulary of 3", "tokenizer has 4"):
        load_teacher(section, model=MODEL, vocabulary_size=4, device=torch.device("cpu"))
    with refused(ModelError, "task.distillation.teacher"):
        check_teacher_tokenizer(DistillationSection(teacher="./none"), model=MODEL, tokenizer=tokenizer("red"))


def test_other_weights_change_the_identity_of_the_teacher(teacher_folder):
    before = weights_digest(str(teacher_folder), section=MODEL, key="task.distillation.teacher", log=print)
    assert before == weights_digest(str(teacher_folder), section=MODEL, key="task.distillation.teacher", log=print)
    model = LlamaForCausalLM.from_pretrained(teacher_folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(teacher_folder)
    assert weights_digest(str(teacher_folder), section=MODEL, key="task.distillation.teacher", log=print) != before
