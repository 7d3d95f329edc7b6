import json
import time
from urllib.parse import quote

import pytest

from finetune.report.events import Answered, event_fields
from finetune.runtime.text.redact import (
    REDACTED,
    KnownSecrets,
    collect_environment_secrets,
    comparable_config,
    is_secret_parameter,
    redact_foreign,
    redact_known,
    redact_known_values,
    redacted_config,
    redacted_urls,
    redacted_variables,
    redacted_yaml,
    register_secrets,
    unsigned_url,
    without_query,
)
from finetune.runtime.text.terminal import printable

CANARY = "c0ffee Ab/+\"'x"


@pytest.fixture
def known(monkeypatch):
    """Return a function that creates KnownSecrets of an environment with these variables."""

    def make(**variables: str) -> KnownSecrets:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        secrets = KnownSecrets()
        secrets.read_environment()
        return secrets

    return make


@pytest.mark.parametrize("form", [str, quote, lambda text: quote(text, safe=""), json.dumps, repr])
def test_a_secret_is_found_in_every_form(known, form):
    assert known(MY_TOKEN=CANARY).redact(f"a{form(CANARY)}b").strip("\"'") in (
        "a[redacted]b",
        "a'[redacted]'b",
        'a"[redacted]"b',
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/work"),
        ("MY_KEY", "short"),
        ("SORT_KEY", "input_ids"),
        ("MY_KEY", "20260101"),
        ("HF_TOKEN_PATH", "/home/me/.token-0Ab"),
        ("TOKEN_TYPE", "Bearer-like1"),
        ("HOME_DIRECTORY", "c0ffee-no-secret"),
    ],
)
def test_ordinary_values_and_paths_are_not_redacted(known, name, value):
    assert known(**{name: value}).redact(f"the {value} of it") == f"the {value} of it"


def test_an_existing_folder_is_not_redacted_but_a_key_starting_with_a_slash_is(known, tmp_path):
    secrets = known(A_KEY=str(tmp_path), B_KEY="/c0ffee+Ab/9")
    assert secrets.redact(f"{tmp_path} /c0ffee+Ab/9") == f"{tmp_path} [redacted]"


def test_a_longer_secret_is_taken_out_whole(known):
    secrets = known(A_KEY="c0ffee-12", B_KEY="c0ffee-12-and-more")
    assert secrets.redact("c0ffee-12-and-more c0ffee-12") == "[redacted] [redacted]"


def test_added_secrets_survive_a_reread_of_the_environment(known):
    secrets = known()
    secrets.add(["c0ffee-of-a-job-1"])
    secrets.read_environment()
    assert secrets.redact("c0ffee-of-a-job-1") == "[redacted]"


PROSE = [
    "set data.chat_template to one that writes a single-token marker there.",
    "Next-token prediction, per-token loss, two-token answers and a sub-token split",
    "Use the --token flag; the password: Swordfish7! and api_key=abcdef123456 are made up",
    "hf_abcdefghijklmnopqrstuvwx sk-abcdefghijklmnopqrstuv ghp_abcdefghijklmnopqrstuvwxyz0123456789",
    'curl -H "Authorization: Bearer abcdefghijklmno1" {"token": "Next", "secret": "sauce"}',
    "token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def -----BEGIN RSA PRIVATE KEY----- key",
]


@pytest.mark.parametrize("text", PROSE)
def test_messages_and_data_are_unchanged_however_their_words_look(text):
    assert redact_known(text) == printable(text) == text
    row = {"messages": [{"role": "assistant", "content": text}], "token": text, "labels": {"password": 3, text: 4}}
    assert redact_known_values(row) == row
    answered = event_fields(Answered(1, text, text, text), time=0.0)
    assert answered["prompt"] == answered["answer"] == answered["reference"] == text


def test_known_secrets_are_removed_from_messages_and_data(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "c0ffee-in-a-variable")
    collect_environment_secrets()
    register_secrets({"api_key": "c0ffee-in-a-key", "a": "push --token c0ffee-of-an-option", "b": f"x/hf_{'a1' * 9}"})
    secrets = ("c0ffee-in-a-variable", "c0ffee-in-a-key", "c0ffee-of-an-option", f"hf_{'a1' * 9}")
    for secret in secrets:
        assert redact_known(f"the answer {secret}.") == "the answer [redacted]."
        assert redact_known_values({secret: [{"text": secret}]}) == {REDACTED: [{"text": REDACTED}]}
    assert redact_known("see https://me:word@h/x?sig=abc") == "see https://[redacted]@h/x?sig=[redacted]"
    monkeypatch.undo()
    collect_environment_secrets()


def test_the_tokens_of_logins_are_known(known, tmp_path):
    (tmp_path / "token").write_text("c0ffee-of-the-hub-1\n")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password c0ffee-of-wandb-2\n")
    secrets = known(HF_HOME=str(tmp_path), NETRC=str(tmp_path / "netrc"))
    assert secrets.redact("c0ffee-of-the-hub-1 c0ffee-of-wandb-2") == "[redacted] [redacted]"
    (tmp_path / "netrc").write_text("no netrc {")
    assert known(HF_TOKEN_PATH="/dev/null/x", NETRC=str(tmp_path / "netrc")).redact("a text") == "a text"


VALUE = "canary-3f9c"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "ACCELERATE_SECRET", "MY_PASSWORD", "SLURM_JWT_TOKEN", "hf_token", "NCCL_AUTH"),
        *("AWS_CREDENTIALS", "SLURM_JWT", "AZURE_STORAGE_SAS", "X_SIGNATURE", "AWS_ACCESS_KEY_ID", "SESSION_COOKIE"),
    ],
)
def test_variables_with_secret_names_lose_their_values(name):
    assert redacted_variables({name: VALUE}) == {name: REDACTED}


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "ACCELERATE_MIXED_PRECISION", "WORLD_SIZE", "HF_HOME"])
def test_variables_without_secret_names_keep_their_values(name):
    assert redacted_variables({name: VALUE}) == {name: VALUE}


@pytest.mark.parametrize(
    "secret",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        "sk-abcdefghijklmnopqrstuv",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAIOSFODNN7EXAMPLE",
    ],
)
def test_tokens_of_known_shape_are_redacted_anywhere(secret):
    assert redact_foreign(f"clone with {secret} please") == f"clone with {REDACTED} please"


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
    ("value", "cleaned"),
    [
        ("--launch --hub-token abc --x 1", "--launch --hub-token [redacted] --x 1"),
        ("a=1;api_key=abc;b=2", "a=1;api_key=[redacted];b=2"),
        ("https://me:abc@h/x?sig=abc", "https://[redacted]@h/x?sig=[redacted]"),
        ("/opt/Model2/checkpoint-0123456789-ABCdef", "/opt/Model2/checkpoint-0123456789-ABCdef"),
        ("123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-12d3-a456-426614174000"),
    ],
)
def test_secrets_within_a_variable_are_left_out(value, cleaned):
    assert redacted_variables({"ACCELERATE_X": value}) == {"ACCELERATE_X": cleaned}


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("--set x.hf_token=abc, hf_token: secrets do not", "--set x.hf_token=[redacted], hf_token: secrets do not"),
        ("call(token='abc', n=1)", "call(token='[redacted]', n=1)"),
        ('{"api_key": "abc", "n": 1}', '{"api_key": "[redacted]", "n": 1}'),
        ("{'password': 'abc'}", "{'password': '[redacted]'}"),
        ("Authorization: Bearer abcdefghijklmno1", "Authorization: Bearer [redacted]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY----- x", "[redacted] x"),
        ("sig eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def x", "sig [redacted] x"),
    ],
)
def test_secrets_under_a_name_in_a_sentence_are_left_out(text, cleaned):
    assert redact_foreign(text) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        "token=None, use_auth_token=True, pad_token=<pad>, token=''",
        "train.tokens=100 num_tokens=3 max_new_tokens: 8 key=3",
        "token='<|im_end|>', Basic understanding of Bearer authentication",
        "Set HF_TOKEN to a token that may write there.",
        "`hf_token`: there is no such key. Write `KEY=VALUE`.",
        "hf_internal_testing/tiny-random-LlamaForCausalLM sk-learn-pipeline",
        "2 of 3 rows have the column `password`: it is not read",
        f"samples {'0123456789abcdef' * 4}",
    ],
)
def test_sentences_that_only_mention_secrets_are_kept(text):
    assert redact_foreign(text) == text


def test_fingerprint_values_do_not_depend_on_secrets_in_the_environment(monkeypatch):
    monkeypatch.setenv("MY_KEY", "c0ffee-Model-8")
    collect_environment_secrets()
    signed = {"path": "https://h/x?X-Amz-Date=1&X-Amz-Signature=2", "name": "c0ffee-Model-8"}
    assert comparable_config(signed) == {"path": "https://h/x", "name": "c0ffee-Model-8"}
    assert redacted_config(signed)["name"] == REDACTED
    monkeypatch.undo()
    collect_environment_secrets()


@pytest.mark.parametrize("piece", ["a_", "eyJ-", "token", "http://a:", "%3Da", "&a=", "{a:", "aA1-", "'a':"])
def test_redaction_is_fast_for_any_text(piece):
    text = piece * (50_000 // len(piece)) + "=://?x="
    began = time.process_time()
    redact_foreign(text)
    redacted_yaml(text)
    redacted_variables({"ACCELERATE_X": f"{text} -"})
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "name",
    [
        *("X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "X-Goog-Signature", "x-goog-credential"),
        *("AWSAccessKeyId", "GoogleAccessId", "Signature", "sig", "token", "access_token", "key", "api_key", "apikey"),
        *("password", "client_secret", "subscription-key", "jwt", "Key-Pair-Id", "__token__"),
    ],
)
def test_signature_and_access_parameters_of_a_url_are_redacted(name):
    assert redacted_urls(f"see https://host/a.jsonl?part=1&{name}=c0ffee&x=2#end") == (
        f"see https://host/a.jsonl?part=1&{name}=[redacted]&x=2#end"
    )


@pytest.mark.parametrize("name", ["part", "page", "num_tokens", "max_tokens", "keyword", "design", "monkey"])
def test_parameters_of_other_urls_are_kept(name):
    assert not is_secret_parameter(name)


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("s3://KEY:SEC/RET+=@bucket/x", "s3://[redacted]@bucket/x"),
        ("https://me:word@host:8080/x", "https://[redacted]@host:8080/x"),
        ("https://TOKEN@host/x.git", "https://[redacted]@host/x.git"),
        ("postgres://u:p@h/d and redis://:p@h", "postgres://[redacted]@h/d and redis://[redacted]@h"),
        ("git+ssh://git@host/x", "git+ssh://git@host/x"),
        ("http://host:8080/a@b", "http://host:8080/a@b"),
        ("abfs://container@account.host/x", "abfs://container@account.host/x"),
        ("hf://datasets/me/rows@main/x.csv", "hf://datasets/me/rows@main/x.csv"),
        ("(https://h/x?token=abc), then", "(https://h/x?token=[redacted]), then"),
        ("https://h/x?token=abc: not there", "https://h/x?token=[redacted]: not there"),
        ("https://h/?a=1&amp;token=abc", "https://h/?a=1&amp;token=[redacted]"),
        ("https://h/x#access_token=abc&b=1", "https://h/x#access_token=[redacted]&b=1"),
        ("https://h/x?X%2DAmz%2DSignature=abc", "https://h/x?X%2DAmz%2DSignature=[redacted]"),
    ],
)
def test_users_and_parameters_of_urls_are_redacted_anywhere_in_a_text(text, cleaned):
    assert redacted_urls(text) == cleaned
    assert redacted_urls(cleaned) == cleaned


def test_a_url_with_a_new_signature_equals_the_earlier_one():
    first, second = (
        f"https://h/rows.jsonl?part=2&X-Amz-Date={day}&X-Amz-Expires=60&X-Amz-Signature={day}ab" for day in (1, 2)
    )
    assert unsigned_url(first) == unsigned_url(second) == "https://h/rows.jsonl?part=2"
    assert unsigned_url("https://h/x?sv=2024&se=9&sp=r&sig=abc") == "https://h/x"


def test_parameters_that_only_look_like_a_signature_s_stay_where_there_is_none():
    assert unsigned_url("https://h/x?expires=never&st=1") == "https://h/x?expires=never&st=1"


def test_only_web_addresses_have_a_query():
    assert without_query("https://h/rows.jsonl?a=1#b") == "https://h/rows.jsonl"
    assert without_query("data/rows?.jsonl") == "data/rows?.jsonl"
    assert without_query("s3://bucket/what?.jsonl") == "s3://bucket/what?.jsonl"
