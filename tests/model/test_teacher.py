"""A teacher is frozen, in its own type, of the student's vocabulary, and known by its weights."""

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.config.sections.model import ModelSection
from finetune.config.sections.task import DistillationSection
from finetune.errors import ModelError
from finetune.model.teacher import check_vocabulary, load_teacher, teacher_digest

MODEL = ModelSection(name="./student")


def tokenizer(*words):
    vocabulary = {word: number for number, word in enumerate(("<eos>", *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained(tmp_path)
    tokenizer("red", "green").save_pretrained(tmp_path)
    return tmp_path


def test_a_teacher_neither_learns_nor_drops_out(folder):
    section = DistillationSection(teacher=str(folder), teacher_dtype="bfloat16")
    teacher = load_teacher(section, model=MODEL, vocabulary_size=3, device=torch.device("cpu"))
    assert not teacher.training
    assert {(each.dtype, each.requires_grad) for each in teacher.parameters()} == {(torch.bfloat16, False)}


def test_another_vocabulary_is_one_sentence(folder):
    section = DistillationSection(teacher=str(folder))
    check_vocabulary(section, model=MODEL, tokenizer=tokenizer("red", "green"))
    with pytest.raises(ModelError, match="is not the student's: 2 tokens differ, such as 'green'"):
        check_vocabulary(section, model=MODEL, tokenizer=tokenizer("green", "red"))
    with pytest.raises(ModelError, match="knows 3 tokens and the student's tokenizer has 4"):
        load_teacher(section, model=MODEL, vocabulary_size=4, device=torch.device("cpu"))
    with pytest.raises(ModelError, match=r"task\.distillation\.teacher: there is no folder"):
        check_vocabulary(DistillationSection(teacher="./none"), model=MODEL, tokenizer=tokenizer("red"))


def test_other_weights_are_another_teacher(folder):
    section = DistillationSection(teacher=str(folder))
    before = teacher_digest(section, model=MODEL, say=print)
    assert before == teacher_digest(section, model=MODEL, say=print)
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(folder)
    assert teacher_digest(section, model=MODEL, say=print) != before
