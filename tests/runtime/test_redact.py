import pytest

from finetune.runtime.redact import REDACTED, redacted_command, redacted_config, redacted_text, redacted_variables

CANARY = "canary-3f9c"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "WANDB_API_KEY",
        "ACCELERATE_SECRET",
        "MY_PASSWORD",
        "SLURM_JWT_TOKEN",
        "hf_token",
        "NCCL_AUTH",
        "AWS_CREDENTIALS",
    ],
)
def test_variables_with_secret_names_lose_their_values(name):
    assert redacted_variables({name: CANARY}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "HF_HOME"])
def test_other_variables_keep_theirs(name):
    assert redacted_variables({name: CANARY}) == {name: CANARY}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-abcdefghijklmnopqrstuv",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAIOSFODNN7EXAMPLE",
    ],
)
def test_tokens_of_known_shape_are_left_out_anywhere(secret):
    assert redacted_text(f"clone with {secret} please") == f"clone with {REDACTED} please"


def test_a_password_in_a_url_is_left_out():
    assert redacted_text(f"https://me:{CANARY}@host/repo.git") == f"https://{REDACTED}@host/repo.git"
    assert redacted_text("https://host:8080/repo") == "https://host:8080/repo"


def test_config_keys_that_only_sound_secret_stay():
    config = {
        "train": {"tokens": 1000, "max_new_tokens": 8},
        "model": {
            "tokenizer": {"name": "x"},
            "values": {"num_key_value_heads": 2, "pad_token": "<pad>", "eos_token_id": 1},
        },
    }
    assert redacted_config(config) == config


@pytest.mark.parametrize(
    "name", ["hub_token", "api_key", "password", "token", "db_password", "secret_key", "auth_token"]
)
def test_config_keys_that_hold_secrets_do_not(name):
    assert redacted_config({"outer": [{name: CANARY}]}) == {"outer": [{name: REDACTED}]}


@pytest.mark.parametrize(
    ("words", "cleaned"),
    [
        (
            ["train", "--hub-token", CANARY, "--config", "a.yaml"],
            ["train", "--hub-token", REDACTED, "--config", "a.yaml"],
        ),
        ([f"--password={CANARY}"], [f"--password={REDACTED}"]),
        (["--set", f"model.api_key={CANARY}"], ["--set", f"model.api_key={REDACTED}"]),
        (["--set", "train.tokens=100"], ["--set", "train.tokens=100"]),
    ],
)
def test_a_command_line_keeps_its_options_and_loses_its_secrets(words, cleaned):
    assert redacted_command(words) == cleaned
