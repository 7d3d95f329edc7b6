"""Templates that are not ours: none takes more than its share of time and memory, and each says what is wrong."""

import json
import os
import subprocess
import sys

import pytest

from finetune.config.sections.data import DataSection
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.sources.source import open_sources
from finetune.data.templates import sandbox as limits
from finetune.data.templates.chat_template import BUILT_IN, MAX_TEMPLATE_BYTES, set_chat_template
from finetune.data.templates.row_template import check_row_template
from finetune.data.token_cache.chunks import Encoding, encode_chunk
from finetune.errors import DataError
from tests.data.template_tokenizers import tokenizer_for

CHATML = BUILT_IN["chatml"].read_text(encoding="utf-8")
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ONLY_IN_LONG = "{{{{ {} if messages | length > 2 }}}}".format("messages[0].content * 10**10")
TOO_MUCH = {
    "a product": ("{{ 'a' * 10**10 }}", "took (more than 512 MB|more than 1 s)"),
    "a product of a row": (ONLY_IN_LONG, "took (more than 512 MB|more than 1 s)"),
    "a format": ("{{ '%1000000000s' % messages[0].content }}", "took (more than 512 MB|more than 1 s)"),
    "loops": (LOOPS, "took more than 1 s"),
    "a macro without end": ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "recursion"),
    "a macro that grows": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "took more than 1 s",
    ),
    "a text that doubles": (
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "took (more than 512 MB|more than 1 s)",
    ),
    "a range": ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "blocks": ("{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "nested blocks"),
}


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(limits, "MAX_SECONDS", 1.0)
    monkeypatch.setattr(limits, "_exceeded", {})
    monkeypatch.setattr(limits, "_usage", {})


def rows_of(tmp_path, rows, **keys):
    """Return the encoding of the rows of a job as a preparing process does it."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(train={"path": str(tmp_path / "rows.jsonl"), **keys}, max_length=512)
    (source,) = open_sources(section, seed=1, log=lambda sentence: None).train

    def encode(tokenizer):
        recipe = Encoding(ConversationEncoder(tokenizer), section, identity={}).plan(source.format)
        return encode_chunk(recipe, list(source.rows()))

    return encode


def turns(number):
    said = [{"role": ("user", "assistant")[n % 2], "content": "abc"} for n in range(number)]
    return {"messages": said}


@pytest.mark.full
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_template_of_the_job_that_takes_too_much_is_named(tmp_path, kind):
    written, reason = TOO_MUCH[kind]
    file = tmp_path / "mine.jinja"
    file.write_text(CHATML + written)
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    with pytest.raises(DataError, match=rf"mine\.jinja.*{reason}"):
        set_chat_template(tokenizer, str(file))
        rows_of(tmp_path, [turns(2), turns(4)])(tokenizer)


@pytest.mark.parametrize("kind", ["a product of a row", "a format", "a macro that grows"])
def test_an_error_of_a_suspicious_model_template_is_reported_with_its_row(tmp_path, kind):
    written, reason = TOO_MUCH[kind]
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML + written
    with pytest.raises(DataError, match=rf"rows\.jsonl, row \d: .*{reason}"):
        rows_of(tmp_path, [turns(2), turns(4)])(tokenizer)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "took (more than 512 MB|more than 1 s)"),
        ("{{ text * 10**9 }}", r"row 1: .*took (more than 512 MB|more than 1 s)"),
        ("{{ text | center(10**10) }}", r"row 1: .*took (more than 512 MB|more than 1 s)"),
        (LOOPS, r"row 1: .*took more than 1 s"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", r"row 1: template of `text`.*recursion"),
    ],
)
def test_a_row_template_that_takes_too_much_is_named(tmp_path, written, reason):
    with pytest.raises(DataError, match=reason):
        encode = rows_of(tmp_path, [{"text": "abc"}], template={"text": written})
        encode(tokenizer_for("<|im_start|><|im_end|>"))


def test_a_template_that_is_slow_for_every_row_is_refused_after_the_third(tmp_path, monkeypatch):
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    tokenizer.chat_template = CHATML + "{{ '' * 3 }}"
    monkeypatch.setattr(limits, "_usage", {tokenizer.chat_template: (2, 3.0)})  # two rows before took 3 s
    with pytest.raises(DataError, match=r"rows\.jsonl, row \d: .*took 3 s of CPU time for 3 rows"):
        rows_of(tmp_path, [turns(2)])(tokenizer)
    monkeypatch.setattr(limits, "_exceeded", {})
    monkeypatch.setattr(limits, "_usage", {tokenizer.chat_template: (20, 3.0)})  # one slow conversation of twenty
    assert rows_of(tmp_path, [turns(2)])(tokenizer)


def test_a_suspicious_template_renders_the_same_in_its_own_process(tmp_path):
    wild = CHATML + "{{ '' * 3 }}{% macro m(n) %}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}"
    plain, apart = (tokenizer_for("<|im_start|><|im_end|>") for _ in range(2))
    plain.chat_template, apart.chat_template = CHATML, wild
    rows = [turns(2), turns(4)]
    here, there = (ConversationEncoder(each)(rows) for each in (plain, apart))
    for one, other in zip(here, there, strict=True):
        assert all((one.arrays[name] == other.arrays[name]).all() for name in one.arrays)


def test_a_fault_in_a_wild_row_template_names_its_line():
    with pytest.raises(DataError, match=r"data\.train\.template\.text, line 2: not valid Jinja"):
        check_row_template("{{ 'a' * 2 }}\n{% if %}", key="data.train.template.text")


def test_a_file_that_is_not_a_template_is_rejected_unread(tmp_path):
    tokenizer = tokenizer_for("<|im_start|><|im_end|>")
    large, fifo = tmp_path / "large.jinja", tmp_path / "fifo.jinja"
    large.write_text("a" * (MAX_TEMPLATE_BYTES + 1))
    os.mkfifo(fifo)
    for file, reason in ((large, "has more than 1 MB"), (fifo, "it is a FIFO")):
        with pytest.raises(DataError, match=reason):
            set_chat_template(tokenizer, str(file))


def test_the_process_needs_no_torch_and_ends_with_the_one_that_started_it():
    code = (
        "from finetune.data.templates.sandbox import run_sandboxed, _workers\n"
        "from finetune.data.templates.sandbox import render_chat\n"
        "arguments = {'conversations': [[]], 'chat_template': 'a' * 3}\n"
        "assert run_sandboxed(render_chat, arguments, name='a', template='a')[0] == 'aaa'\n"
        "(worker,) = _workers.values()\n"
        "maps = open(f'/proc/{worker.process.pid}/maps').read()\n"
        "assert 'torch' not in maps\n"
        "import os, sys; print(worker.process.pid, flush=True); os._exit(0)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert made.stdout.strip().isdigit()  # its output has ended, which it holds open as long as it lives
