"""Counts of what was noticed about the turns of rows: summed over chunks, kept in manifests, shown as lines."""

import json
from dataclasses import asdict

import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.preference import PreferenceEncoder
from finetune.data.rows import RawRow
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.token_cache.chunks import Encoding, encode_chunk
from finetune.data.token_cache.counts import Counts, total_counts
from finetune.data.token_cache.lengths import SampleLengthLimit

ASKED = {"role": "user", "content": "What is two and two?"}


def answered(content="Four.", **keys):
    return {"role": "assistant", "content": content, **keys}


def counted(encoder, *rows):
    """Return the counts of the rows, each encoded as a chunk of its own."""
    plan = Encoding(encoder, None, {}, length=SampleLengthLimit(500, "refuse"))
    chunks = [encode_chunk(plan, [RawRow("rows.jsonl", number, row)]) for number, row in enumerate(rows, start=1)]
    return total_counts(chunk.counts for chunk in chunks)


def test_unread_keys_and_empty_answers_are_summed_and_named(tokenizer):
    set_chat_template(tokenizer, "qwen")
    counts = counted(
        ConversationEncoder(tokenizer),
        {"messages": [{**ASKED, "country": "US"}, answered(thoughts="Add.", wieght=0)]},
        {"messages": [ASKED, answered(""), {**ASKED, "country": "NO"}, answered(" ", country="NO")]},
        {"messages": [ASKED, answered("")]},
        {"messages": [ASKED, answered(thoughts="Add.", country="US")]},
        {"messages": [ASKED, answered()]},
    )
    assert counts.unread_keys == {"country": 3, "thoughts": 2, "wieght": 1}
    assert list(counts.unread_keys) == ["country", "thoughts", "wieght"]  # manifests are bitwise the same
    assert (counts.empty_answers, counts.first_empty_answer) == (3, "rows.jsonl, row 2")
    (warning,) = [line for line in counts.lines() if line.startswith("warning")]
    assert "3, the first in rows.jsonl, row 2" in warning
    assert "unread keys of turns: `country` in 3 rows, `thoughts` in 2 rows, `wieght` in 1 rows" in counts.lines()
    assert Counts.read({"former_count": 1, **asdict(counts)}) == counts
    assert Counts(**json.loads(json.dumps(asdict(counts)))) == counts


def test_each_answer_that_is_a_sample_of_its_own_is_counted_once_and_its_row_once(tokenizer):
    set_chat_template(tokenizer, "qwen")
    talk = [{**ASKED, "country": "US"}, answered(""), ASKED, answered(""), ASKED, answered()]
    counts = counted(ConversationEncoder(tokenizer, train_on="each_assistant"), {"messages": talk})
    assert (counts.samples, counts.empty_answers, counts.unread_keys) == (3, 2, {"country": 1})


@pytest.mark.parametrize("judged", [True, False])
def test_the_answers_of_a_pair_are_counted_without_mismatched_ones(tokenizer, judged):
    set_chat_template(tokenizer, "qwen")
    pair = {"prompt": [ASKED], "chosen": [answered()], "rejected": [answered("", thoughts="Add.")]}
    encode = PreferenceEncoder(ConversationEncoder(tokenizer), "preference", judged=judged)
    counts = counted(encode, pair)
    assert (counts.empty_answers, counts.unread_keys) == (1, {"thoughts": 1})


def test_counts_of_an_earlier_version_have_no_unread_keys():
    """And rows with ever new keys do not fill the manifest."""
    assert Counts(rows=1).plus(Counts(**{"rows": 2})).unread_keys == {}
    many = Counts(unread_keys={f"key{number:03}": 1 for number in range(150)})
    total = many.plus(Counts(unread_keys={"key149": 1}))
    assert len(total.unread_keys) == 100 and next(iter(total.unread_keys.items())) == ("key149", 2)
