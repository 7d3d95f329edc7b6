"""A template with arguments that rewrites earlier turns: each answer is a sample, from training to `generate`."""

import functools
import json
from unittest.mock import patch

import pytest
from transformers import AutoTokenizer

from finetune.commands.chat import load_chat_model
from finetune.commands.evaluate import evaluate
from finetune.commands.export import export
from finetune.commands.generate import GenerationOptions, generate_file
from finetune.commands.preview.preview import preview
from finetune.commands.source import use_written_arguments
from finetune.data.encoding.conversation import ChatPrompt, prompt_ids
from finetune.data.templates.rendering import arguments_of
from finetune.errors import CheckpointError, DataError, UserError
from finetune.model.generation import SamplingParams
from finetune.model.loading.saved import inspect_model_folder
from finetune.report.history import read_events
from finetune.runtime import distributed
from tests.scenarios.trained import forget, stay, train_here

TEMPLATE = """\
<|im_start|>system
effort {{ effort or 'middling' }}<|im_end|>
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}
{{- m.content }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
JOB = """
run: {folder: run, seed: 7}
model:
  from_config:
    model_type: llama
    values: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: rows.jsonl}
  validation: {path: rows.jsonl, take: 3}
  max_length: 256
  chat_template: ./thinking.jinja
  train_on: each_assistant
  chat_template_arguments: {effort: low}
  cache_folder: cache
  batching: {by: packs, tokens: 512}
task: {name: sft}
train: {global_batch_size: 2, microbatch_size: 1, steps: 4, learning_rate: 1e-2}
checkpoint: {every_steps: 2}
evaluate: {every_steps: 4, generate: {num_samples: 2, max_new_tokens: 4}}
report: {console: plain, log_every_steps: 1}
"""
NUM_ROWS = 12


def rows():
    for number in range(NUM_ROWS):
        turns = []
        for part in range(2):
            turns.append({"role": "user", "content": f"{number} and {part}?"})
            answer = {"role": "assistant", "content": f"It is {number + part}.", "reasoning_content": f"From {number}"}
            turns.append(answer)
        yield {"messages": turns, "chat_template_kwargs": {"effort": "high" if number == 0 else None}}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (folder / "thinking.jinja").write_text(TEMPLATE)
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


@functools.cache
def trained(job):
    train_here(job)
    return job.parent / "run"


def losses(run):
    return {
        event["step"]: event["loss"] for event in read_events(run / "events.jsonl") if event["event"] == "StepTaken"
    }


def prompt(tokenizer):
    return tokenizer.decode(prompt_ids(tokenizer, ChatPrompt([{"role": "user", "content": "1 and 0?"}])))


def test_each_answer_is_counted_in_the_audit(job):
    audit = json.loads((trained(job) / "audit.json").read_text())
    counts = audit["total"]["counts"]
    assert (counts["rows"], counts["samples"], counts["answers"]) == (NUM_ROWS, 2 * NUM_ROWS, 2 * NUM_ROWS)
    assert counts["repeated_tokens"] > 0
    assert (counts["argument_rows"], counts["dropped_reasoning_rows"]) == (1, 0)
    assert audit["template"]["arguments"] == {"effort": "low"}
    assert "several answers" in audit["template"]["learnt"]
    assert audit["template"]["differences"] == []


def test_the_model_is_measured_again_with_the_same_arguments(job, tmp_path):
    run = trained(job)
    (told,) = [event["metrics"] for event in read_events(run / "events.jsonl") if event["event"] == "Evaluated"]
    written = tmp_path / "metrics.json"
    with patch.object(distributed, "shut_down", stay):
        assert evaluate(run, step=None, config=None, overrides=(), json=written) == 0
        assert json.loads(written.read_text())["metrics"] == told
        evaluate(run, step=None, config=None, overrides=["data.chat_template_arguments={effort: high}"], json=written)
    assert json.loads(written.read_text())["metrics"]["loss"] != told["loss"]
    forget()


def test_the_export_saves_template_arguments_and_documents_them_in_its_card(job, tmp_path):
    run = trained(job)
    export(run, step=2, to=tmp_path / "early", dtype=None, merge=False, push_to_hub=None)
    for folder in (run / "final", tmp_path / "early"):
        card = (folder / "README.md").read_text()
        assert "tokenizer.apply_chat_template(messages, add_generation_prompt=True, effort='low')" in card
        assert '"chat_template_kwargs": {"effort": "low"}' in card
        assert arguments_of(AutoTokenizer.from_pretrained(folder)) == {"effort": "low"}


def test_chat_and_generate_use_the_template_arguments_of_training_by_default(job, tmp_path):
    run = trained(job)
    saved = inspect_model_folder(run / "final", key="chat")
    tokenizer = load_chat_model(saved, SamplingParams(256), adapters={}, trust_remote_code=False).tokenizer
    assert prompt(tokenizer).startswith("<|im_start|>system\neffort low<|im_end|>")
    use_written_arguments(tokenizer, ["effort=high"])
    assert prompt(tokenizer).startswith("<|im_start|>system\neffort high<|im_end|>")
    with pytest.raises(
        UserError, match=r"--template-argument efort: the chat template does not read it\. It reads `effort`"
    ):
        use_written_arguments(tokenizer, ["efort=high"])
    with pytest.raises(UserError, match="write NAME=VALUE"):
        use_written_arguments(tokenizer, ["effort"])
    settings = {"adapter": None, "max_new_tokens": 4, "batch_size": 2, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    settings |= {"system": None, "trust_remote_code": False}
    rows = tmp_path / "asked.jsonl"
    asked = [{"prompt": "1 and 0?"}, {"prompt": "1 and 0?", "chat_template_kwargs": {"effort": "high"}}]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    said = []
    with (
        patch.object(distributed, "shut_down", stay),
        patch("finetune.commands.generate.prompt_ids", lambda *given: said.append(prompt_ids(*given)) or said[-1]),
    ):
        generate_file(run, rows=rows, output=tmp_path / "a.jsonl", options=GenerationOptions(**settings))
        other = GenerationOptions(**settings, template_arguments=["effort=none"])
        generate_file(run, rows=rows, output=tmp_path / "b.jsonl", options=other)
    efforts = [tokenizer.decode(ids).split("<|im_end|>")[0].rsplit(" ", 1)[1] for ids in said]
    assert efforts == ["low", "high", "none", "high"]


@pytest.mark.full
def test_a_stopped_run_takes_the_very_next_samples(job):
    whole = losses(trained(job))
    train_here(job, "run.folder=stopped", "train.stop_after_steps=2")
    train_here(job, "run.folder=stopped")
    assert losses(job.parent / "stopped") == whole
    with pytest.raises(CheckpointError, match="training data"):
        train_here(job, "run.folder=stopped", "train.steps=6", "data.chat_template_arguments={effort: high}")
    with pytest.raises(CheckpointError, match="training data"):
        train_here(job, "run.folder=stopped", "train.steps=6", "data.train_on_reasoning=false")


@pytest.mark.full
def test_a_mix_with_a_stream_holds_the_same_answers(job, capsys):
    mix = "data.train={mix: [{path: rows.jsonl, weight: 1, stream: {window_rows: 12}}, {path: rows.jsonl, weight: 1}]}"
    sizes = ["data.batching={by: samples}", "data.validation=null", "evaluate=null", "train.steps=2"]
    train_here(job, "run.folder=mixed", mix, *sizes)
    assert set(losses(job.parent / "mixed")) == {1, 2}
    said = capsys.readouterr().out
    for source in (0, 1):
        assert any(line.startswith(f"data.train.mix.{source}: ") and "24 answers" in line for line in said.splitlines())


def test_a_preview_shows_each_answer_and_a_wrong_argument_its_line(job, capsys):
    preview(job, ["data.batching={by: samples}", "data.shuffle=false"], num_rows=2, start=0)
    said = capsys.readouterr().out.replace("┊", "")
    assert "rows.jsonl, row 1 " in said
    assert said.count("row 1 ") >= 2
    assert "effort·high" in said  # the row's own
    assert "⟦<think>From·0</think>It·is·0.<|im_end|>⟧" in said
    assert 'rendered with effort: "low"' in said
    text = job.read_text().replace("{effort: low}", "\n    effort: low\n    efort: 1")
    (job.parent / "wrong.yaml").write_text(text)
    line = text.splitlines().index("    efort: 1") + 1
    with pytest.raises(
        DataError, match=rf"^line {line}, data\.chat_template_arguments\.efort: the chat template does not read it"
    ):
        preview(job.parent / "wrong.yaml", [], num_rows=2, start=0)


def test_template_arguments_of_the_base_model_are_kept_and_logged(job, capsys):
    final = trained(job) / "final"
    base = f"model={{name: {final}}}"
    own = ["data.chat_template=null", "data.chat_template_arguments=null", base]
    preview(job, own, num_rows=1, start=0)
    said = capsys.readouterr().out
    assert 'the tokenizer comes with chat template arguments, which are used: {"effort": "low"}.' in said
    preview(job, [*own[::2], "data.chat_template_arguments={}"], num_rows=1, start=0)
    assert "brings arguments" not in capsys.readouterr().out
