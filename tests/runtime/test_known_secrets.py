import json
from urllib.parse import quote

import pytest

from finetune.runtime.known_secrets import KnownSecrets

CANARY = "c0ffee Ab/+\"'x"


@pytest.fixture
def known(monkeypatch):
    """Return a function that makes one that knows the environment, with these variables set."""

    def make(**variables: str) -> KnownSecrets:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        secrets = KnownSecrets()
        secrets.look()
        return secrets

    return make


@pytest.mark.parametrize("form", [str, quote, lambda text: quote(text, safe=""), json.dumps, repr])
def test_a_secret_is_found_in_every_form(known, form):
    assert known(MY_TOKEN=CANARY).leave_out(f"a{form(CANARY)}b").strip("\"'") in (
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
def test_ordinary_words_and_places_are_left_alone(known, name, value):
    assert known(**{name: value}).leave_out(f"the {value} of it") == f"the {value} of it"


def test_a_folder_that_exists_is_no_secret_but_a_key_that_begins_with_a_slash_is(known, tmp_path):
    secrets = known(A_KEY=str(tmp_path), B_KEY="/c0ffee+Ab/9")
    assert secrets.leave_out(f"{tmp_path} /c0ffee+Ab/9") == f"{tmp_path} [redacted]"


def test_a_longer_secret_is_taken_out_whole(known):
    secrets = known(A_KEY="c0ffee-12", B_KEY="c0ffee-12-and-more")
    assert secrets.leave_out("c0ffee-12-and-more c0ffee-12") == "[redacted] [redacted]"


def test_what_is_added_stays_known_when_the_environment_is_looked_at_again(known):
    secrets = known()
    secrets.add(["c0ffee-of-a-job-1"])
    secrets.look()
    assert secrets.leave_out("c0ffee-of-a-job-1") == "[redacted]"
