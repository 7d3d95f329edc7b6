"""Every row of a file is answered once, in order; neither batches nor processes nor a kill alter the answers."""

import json
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.commands import generate as generating
from finetune.commands.generate import GenerationOptions, generate_file
from finetune.errors import DataError, UserError
from finetune.runtime import distributed
from finetune.runtime.files.atomic import read_json_lines

ROWS = [
    {"id": 0, "prompt": "reverse: red green"},
    {"id": 1, "messages": [{"role": "user", "content": "reverse: blue"}, {"role": "assistant", "content": "blue"}]},
    {"id": 2, "instruction": "reverse:", "input": "pink grey white black"},
    {"id": 3, "conversations": [{"from": "human", "value": "reverse: amber"}]},
    {"id": 4, "prompt": [{"role": "system", "content": "Say it."}, {"role": "user", "content": "blue"}]},
]

OPTIONS = GenerationOptions(
    adapter=None,
    max_new_tokens=6,
    batch_size=2,
    temperature=0.0,
    top_p=1.0,
    seed=0,
    system=None,
    trust_remote_code=False,
)


@pytest.fixture
def answered(tmp_path):
    """Return a function that answers rows and returns the rows that were written."""

    def answer(source, rows=ROWS, **keys):
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = tmp_path / "answers.jsonl"
        output.unlink(missing_ok=True)
        options = replace(OPTIONS, **keys)
        assert generate_file(source, rows=tmp_path / "prompts.jsonl", output=output, options=options) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    return answer


def texts(rows):
    return [row["answer"] for row in rows]


def test_greedy_answers_are_those_of_plain_transformers_row_by_row(trained, answered):
    final = trained("full") / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    found = answered(final)
    assert [{name: value for name, value in row.items() if name != "answer"} for row in found] == ROWS
    questions = [
        [{"role": "user", "content": "reverse: red green"}],
        [{"role": "user", "content": "reverse: blue"}],
        [{"role": "user", "content": "reverse:\n\npink grey white black"}],
        [{"role": "user", "content": "reverse: amber"}],
        ROWS[4]["prompt"],
    ]
    for turns, text in zip(questions, texts(found), strict=True):
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        made = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
        assert text == tokenizer.decode(made, skip_special_tokens=True).strip()


def test_sampled_answers_depend_only_on_seed_and_row(trained, answered):
    run = trained("full")
    drawn = [texts(answered(run, temperature=1.0, batch_size=size)) for size in (1, 2, 5)]
    assert drawn[0] == drawn[1] == drawn[2]
    assert texts(answered(run, temperature=1.0, seed=1)) != drawn[0] != texts(answered(run))
    again = texts(answered(run, temperature=1.0, rows=[ROWS[0], ROWS[0]]))
    assert again[0] == drawn[0][0] != again[1]  # the same question at another place is drawn anew


def test_the_likeliest_share_alone_is_drawn_from(trained, answered):
    run = trained("full")
    assert texts(answered(run, temperature=1.0, top_p=1e-6)) == texts(answered(run))


class SecondOfTwo:
    """Stands for `finetune.runtime.distributed` in a process that answers as the second of two, and joins the parts."""

    def __getattr__(self, name):
        return {"rank": lambda: 1, "world": lambda: 2}.get(name) or getattr(distributed, name)


def test_a_share_of_the_ranks_is_the_whole(trained, answered, monkeypatch, tmp_path):
    """Two processes, one after the other in this one: each writes its part, and the first joins both."""
    run = trained("full")
    alone = texts(answered(run))
    parts = tmp_path / ".answers.jsonl.parts"
    monkeypatch.setattr(generating, "distributed", SecondOfTwo())
    with pytest.raises(UserError, match="has no answer for row 1 "):  # the other rank has not written its part
        answered(run)
    assert {line["row"] for path in parts.glob("rank-*") for line in read_json_lines(path)} == {1, 3}
    monkeypatch.setattr(generating, "distributed", distributed)
    assert texts(answered(run)) == alone
    assert not parts.exists()


def test_a_killed_generation_resumes_and_keeps_its_answers(trained, answered, monkeypatch, tmp_path):
    run = trained("full")
    alone = texts(answered(run, batch_size=1))
    calls, real = [], generating.generate_batch

    def dying(*arguments, **keys):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **keys)

    monkeypatch.setattr(generating, "generate_batch", dying)
    with pytest.raises(KeyboardInterrupt):
        answered(run, batch_size=1)
    (part,) = (tmp_path / ".answers.jsonl.parts").glob("rank-*.jsonl")
    with part.open("a") as file:
        file.write('{"row": 4, "ans')  # torn
    assert not (tmp_path / "answers.jsonl").exists()
    with pytest.raises(UserError, match="answers of an earlier command with another model, input or settings"):
        answered(run, batch_size=1, seed=5)
    assert texts(answered(run, batch_size=1)) == alone
    assert len(calls) == 3 + 3  # two of five were there


def test_an_adapter_is_put_on_its_base(trained, answered):
    final = trained("lora") / "final"
    merged = texts(answered(trained("merged")))
    assert texts(answered(final)) == texts(answered(final / "base", adapter=final)) == merged
    with pytest.raises(UserError, match="is itself an adapter"):
        answered(final, adapter=final)


def test_the_system_option_is_used_for_rows_without_a_system_message(trained, answered):
    run = trained("full")
    spoken = texts(answered(run, system="Say it.", rows=[{"prompt": "blue"}]))
    assert spoken == texts(answered(run, rows=[{"prompt": ROWS[4]["prompt"]}]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "a"}, r"row 1: has neither `messages`, .* its columns are `question`"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "has only answers"),
        ({"prompt": "a", "answer": "b"}, "already has a column `answer`"),
        ({"prompt": "a", "images": ["a.png"]}, "only text is supported here"),
        ({"prompt": "red " * 3000}, "but the model reads at most 2,048"),
    ],
)
def test_a_row_that_asks_nothing_is_named(trained, answered, row, message):
    with pytest.raises(DataError, match=message):
        answered(trained("full"), rows=[row])


def test_an_output_that_is_there_is_not_written_over(trained, tmp_path):
    (tmp_path / "answers.jsonl").write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        generate_file(trained("full"), rows=tmp_path, output=tmp_path / "answers.jsonl", options=OPTIONS)
