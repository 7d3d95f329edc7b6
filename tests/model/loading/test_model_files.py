"""The files of a model's folder are checked before libraries read them."""

import os

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from finetune.errors import ModelError
from finetune.model.loading.hub import check_model_files, check_tokenizer
from tests.refusals import refused


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "generation_config.json", "x.jinja"])
def test_a_fifo_in_a_model_folder_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with refused(ModelError, f"{name}: "):
        check_model_files(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused_and_a_link_to_a_file_is_not(tmp_path):
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    check_model_files(tmp_path)
    (tmp_path / "tokenizer.json").mkdir()
    with refused(ModelError, "tokenizer.json"):
        check_model_files(tmp_path)


def tokenizer(normalizer: object = None, post_processor: object = None) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    if normalizer is not None:
        backend.normalizer = normalizer
    if post_processor is not None:
        backend.post_processor = post_processor
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Replace("", "x" * 1_000_000),
        normalizers.Replace(Regex("a*"), "x"),
        normalizers.Replace(Regex(r"[[:punct:]]*"), "x"),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\b"), "x")]),
        normalizers.Replace(Regex("(?=h)"), "x"),
        normalizers.Replace("a", "x" * 1_000_000),
        normalizers.Prepend("x" * 100_000),
        normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 40),
        normalizers.Sequence([normalizers.Sequence([normalizers.Replace("a", "a" * 200)] * 3)]),
    ],
)
def test_a_normalizer_without_bounds_is_refused(normalizer: object):
    with refused(ModelError):
        check_tokenizer(tokenizer(normalizer), "folder")


def test_a_post_processor_that_adds_thousands_of_tokens_is_refused():
    template = " ".join(["[CLS]"] * 2000) + " $A"
    processor = processors.TemplateProcessing(single=template, special_tokens=[("[CLS]", 1)])
    with refused(ModelError):
        check_tokenizer(tokenizer(post_processor=processor), "folder")


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        normalizers.NFKC(),
        normalizers.BertNormalizer(),
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        normalizers.Replace(Regex(r"\s*$"), ""),
        normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFD(), normalizers.StripAccents()]),
        normalizers.Sequence([normalizers.Replace("``", '"'), normalizers.Replace("\u2026", "...")] * 10),
    ],
)
def test_known_normalizers_pass(normalizer: object):
    check_tokenizer(tokenizer(normalizer), "folder")
    check_tokenizer(None, "folder")
