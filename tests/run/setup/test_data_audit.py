"""The audit of real data says what a plain script of its own counts in them."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from finetune.config.load import load_config
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import audit_training_data, make_training_data, write_audit
from tests.run.setup.plain_audit import gsm8k, hh_rlhf, plain_audit

DATA = Path(__file__).parents[4] / "shared" / "data"
GSM8K, HH_RLHF = DATA / "gsm8k" / "train.jsonl", DATA / "hh-rlhf" / "harmless-base-test.jsonl.gz"

JOB = """
run: {{folder: run}}
model:
  from_config: {{model_type: llama, values: {{hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}}}
  tokenizer: {{train: {{vocabulary_size: 1000}}}}
data:
  train:
    path: {path}
{source}
  max_length: {max_length}
  over_length: {over_length}
  no_target: drop
  chat_template: chatml
  cache_folder: {cache}
task: {{name: sft}}
train: {{global_batch_size: 8, microbatch_size: 4, steps: 2, learning_rate: 1e-3}}
"""
COLUMNS = """\
    format: prompt_completion
    columns: {prompt: question, completion: answer}
"""
TEMPLATE = """\
    format: messages
    template:
      messages: |
        [{% for part in chosen.split('\\n\\nHuman: ')[1:] %}
        {% for said in part.split('\\n\\nAssistant: ') %}
        {{ {'role': 'user' if loop.first else 'assistant', 'content': said | trim} | tojson }}{{ ',' if not loop.last }}
        {% endfor %}
        {{ ',' if not loop.last }}
        {% endfor %}]
"""


def audited(folder, path, source, *, max_length, over_length, cache):
    """Return the audit of the job as JSON has it, and its tokenizer as transformers alone opens it."""
    text = JOB.format(path=path, source=source, max_length=max_length, over_length=over_length, cache=cache)
    (folder / "job.yaml").write_text(text)
    config = load_config(folder / "job.yaml").config
    lessons = make_training_data(config, RunLog(is_main=False))
    lessons.tokenizer.save_pretrained(folder / "tokenizer")
    (source,) = audit_training_data(config, lessons).as_json()["sources"]
    return {**source["counts"], "duplicates": source["duplicates"]}, AutoTokenizer.from_pretrained(folder / "tokenizer")


@pytest.mark.parametrize("is_padded", [True, False])
def test_the_start_logs_the_share_of_padding(tmp_path, is_padded):
    rows = [{"question": "a " * length, "answer": "b"} for length in (1, 40, 3, 30, 5, 20, 2, 10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"path": "rows.jsonl", "source": COLUMNS, "max_length": 128, "over_length": "truncate", "cache": "cache"}
    (tmp_path / "job.yaml").write_text(JOB.format(**settings))
    said: list[str] = []
    shares = []
    for steps in ("auto", 0) if is_padded else ("auto",):
        layout = [
            f"data.batching.padding_free={str(not is_padded).lower()}",
            f"data.batching.length_window_steps={steps}",
        ]
        config = load_config(tmp_path / "job.yaml", layout).config
        data = make_training_data(config, RunLog(is_main=False))
        write_audit(tmp_path, config, data, log=said.append)
        shares.append(audit_training_data(config, data).padding.share)
    lines = [line for line in said if line.startswith("padding: ")]
    if is_padded:
        assert 0 < shares[0] < shares[1]
        assert lines[0].startswith(f"padding: {shares[0]:.1%} of the computed positions (plain batches: ")
    else:
        assert (shares, lines) == ([0.0], [])


@pytest.mark.full
@pytest.mark.parametrize(
    ("path", "source", "turns_of", "max_length", "over_length"),
    [
        (GSM8K, COLUMNS, gsm8k, 256, "truncate"),
        (HH_RLHF, TEMPLATE, hh_rlhf, 200, "truncate"),
        (HH_RLHF, TEMPLATE, hh_rlhf, 200, "drop"),
    ],
    ids=["gsm8k-truncate", "hh-rlhf-truncate", "hh-rlhf-drop"],
)
def test_the_figures_are_those_of_a_plain_script(
    tmp_path, tmp_path_factory, path, source, turns_of, max_length, over_length
):
    if not path.is_file():
        pytest.skip(f"there is no {path}")
    cache = tmp_path_factory.getbasetemp() / "audit-cache"
    found, tokenizer = audited(tmp_path, path, source, max_length=max_length, over_length=over_length, cache=cache)
    expected = plain_audit(path, turns_of, tokenizer, max_length=max_length, over_length=over_length)
    assert {name: found[name] for name in expected} == expected
    assert found["masked_tokens"] == expected["tokens"] - expected["targets"]
    assert (
        expected["samples"] > 1000 and expected["truncated_rows"] + expected["long_rows"] > 100
    )  # there was something
