import pytest

from finetune.runtime.text.redact import (
    is_secret_parameter,
    redacted_urls,
    secrets_in_urls,
    unsigned_url,
    without_query,
)


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


def test_secrets_in_urls_are_known_encoded_and_decoded():
    found = set(secrets_in_urls("https://me:pass%2Fword@h/x?sig=a%2Bb"))
    assert {"pass%2Fword", "pass/word", "a%2Bb", "a+b"} <= found


def test_only_web_addresses_have_a_query():
    assert without_query("https://h/rows.jsonl?a=1#b") == "https://h/rows.jsonl"
    assert without_query("data/rows?.jsonl") == "data/rows?.jsonl"
    assert without_query("s3://bucket/what?.jsonl") == "s3://bucket/what?.jsonl"
