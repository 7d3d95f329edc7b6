"""General rows: the package's own, and those of a file."""

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.commands.gate.general import GENERAL_ROWS, read_general
from finetune.config.sections.data import DataSection
from finetune.data.templates.chat_template import set_chat_template
from finetune.errors import DataError
from tests.small_job import conversation, write_rows
from tests.small_models import TINY, byte_tokenizer


def read(path, *, template="chatml", longest=1_000):
    tokenizer = byte_tokenizer(special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    set_chat_template(tokenizer, template)
    data = DataSection.model_validate({"train": {"path": "train.jsonl"}, "max_length": 10_000, "train_on": "all"})
    config = LlamaConfig(max_position_embeddings=longest + 32, vocab_size=len(tokenizer), **TINY)
    return read_general(path, data, tokenizer, LlamaForCausalLM(config))


def test_the_package_brings_20_texts_and_20_chats_of_its_own():
    rows = [json.loads(line) for line in GENERAL_ROWS.read_text().splitlines()]
    assert [len(row) for row in rows] == [1] * 40 and len({str(row) for row in rows}) == 40
    assert sum("text" in row for row in rows) == sum(len(row.get("messages", ())) == 2 for row in rows) == 20
    general = read(GENERAL_ROWS)
    assert (len(general.samples), general.num_left_out) == (40, 0)


def test_a_chat_is_answered_after_its_question_and_a_text_is_continued(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [conversation("red?", "blue"), {"text": "abcdefg"}])
    general = read(tmp_path / "rows.jsonl")
    decode = general.tokenizer.decode
    chat, text = ((decode(prompt.input_ids), decode(prompt.reference_ids)) for prompt in general.prompts)
    assert chat == ("<|im_start|>user\nred?<|im_end|>\n<|im_start|>assistant\n", "blue<|im_end|>")
    assert text == ("abcd", "efg<|endoftext|>")
    assert [int(sample.arrays["is_target"].sum()) for sample in general.samples] == [5, 7]


def test_chats_without_a_template_and_long_rows_are_left_out(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [conversation("red?", "blue"), {"text": "abc"}, {"text": "abc" * 50}])
    assert read(tmp_path / "rows.jsonl", template=None, longest=100).num_left_out == 2
    with pytest.raises(DataError, match=r"rows.jsonl has no row of at most 2 tokens"):
        read(tmp_path / "rows.jsonl", longest=2)


def test_a_row_of_another_kind_is_named(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"text": "abc"}, {"label": 1}])
    with pytest.raises(DataError, match=r"rows.jsonl, row 2: .*`text` or `messages`"):
        read(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": 3}]}])
    with pytest.raises(DataError, match=r"rows.jsonl, row 1"):
        read(tmp_path / "rows.jsonl")
