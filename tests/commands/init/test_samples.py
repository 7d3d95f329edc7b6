"""The samples of TRL's own trainers beside those of the migrated job."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune.cli.app import app
from tests.serving_folders import make_model, make_tokenizer, save

ARGUMENTS = "max_length: 64\nper_device_train_batch_size: 2\nlearning_rate: 1e-4\nmax_steps: 20\n"


def user(number):
    return {"role": "user", "content": f"What is {number} plus one?"}


def assistant(text):
    return {"role": "assistant", "content": text}


def pair(number):
    answers = {"chosen": [assistant(f"It is {number + 1}.")], "rejected": [assistant(f"It is {number}, or so.")]}
    return {"prompt": [user(number)], **answers}


ROWS = {
    "messages": lambda number: {"messages": [user(number), assistant(f"It is {number + 1}.")]},
    "texts": lambda number: {"prompt": f"What is {number} plus one?", "completion": f" It is {number + 1}."},
    "text": lambda number: {"text": f"{number} plus one is {number + 1}."},
    "pairs": pair,
    "judged": lambda number: {
        "prompt": [user(number)],
        "completion": [assistant(f"It is {number}.")],
        "label": bool(number % 2),
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    tokenizer = make_tokenizer(bos=None)
    return save(
        make_model("qwen2", vocabulary_size=len(tokenizer)), tokenizer, tmp_path_factory.mktemp("model") / "small"
    )


def prove(tmp_path: Path, model: Path, rows: str, keys: str = "") -> str:
    """Return the output of `init --from --prove` for a config of TRL on 12 of these rows."""
    (tmp_path / "rows").mkdir()
    lines = "".join(json.dumps(ROWS[rows](number)) + "\n" for number in range(12))
    (tmp_path / "rows" / "train.jsonl").write_text(lines)
    arguments = ARGUMENTS if "max_length" not in keys else ARGUMENTS.replace("max_length: 64\n", "")
    theirs = f"model_name_or_path: {model}\ndataset_name: {tmp_path / 'rows'}\n{arguments}{keys}"
    (tmp_path / "theirs.yaml").write_text(theirs)
    words = ["init", "--from", str(tmp_path / "theirs.yaml"), "--into", str(tmp_path / "ours"), "--prove"]
    result = CliRunner().invoke(app, words)
    assert "Traceback" not in result.output and "learning rates of 20 steps" in result.output
    return result.output


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        ("texts", ""),  # which TRL does not put into the chat template
        ("text", ""),
        ("pairs", "center_rewards_coefficient: 0.01\n"),  # of a reward
        ("texts", "completion_only_loss: false\n"),
    ],
)
def test_samples_of_trl_and_of_the_migrated_job_are_equal(tmp_path, model, rows, keys):
    assert "the same token ids and targets: 12 of 12 rows" in prove(tmp_path, model, rows, keys)


@pytest.mark.parametrize(("rows", "keys"), [("messages", ""), ("pairs", "beta: 0.1\n"), ("judged", "loss_type: kto\n")])
def test_a_newline_of_the_template_after_an_answer_is_a_target_of_trl_alone(tmp_path, model, rows, keys):
    output = prove(tmp_path, model, rows, keys + ("desirable_weight: 1.0\n" if rows == "judged" else ""))
    assert "the same token ids and targets: 0 of 12 rows" in output
    assert r"'\n', is a target there alone" in output


def test_rows_without_a_target_are_the_data_error_that_training_would_raise(tmp_path, model):
    output = " ".join(prove(tmp_path, model, "texts", "max_length: 8\n").split())
    assert "error: data.train: 12 of 12 rows have no target" in output


def test_a_file_without_rows_cannot_be_compared(tmp_path, model):
    (tmp_path / "theirs.json").write_text(json.dumps({"output_dir": "x", "model_name_or_path": str(model), "beta": 1}))
    words = ["init", "--from", str(tmp_path / "theirs.json"), "--into", str(tmp_path / "ours"), "--prove"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_rows_that_trl_cannot_prepare_are_one_message(tmp_path, model):
    output = prove(tmp_path, model, "messages", "assistant_only_loss: true\n")
    assert "--prove: TRL cannot prepare the rows: ValueError: " in " ".join(output.split())
