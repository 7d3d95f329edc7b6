"""Every position of a secret in a value, times every function that writes or prints the value."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.sweep.axes import run_name, value_text
from finetune.config.explain import resolved_yaml
from finetune.config.formatting import format_value
from finetune.config.load import LoadedConfig, load_config
from finetune.config.overrides import override_label, override_text
from finetune.config.resume_keys import keys_that_may_differ, keys_that_must_match
from finetune.config.yaml import read_yaml
from finetune.report.events import Warned, event_fields
from finetune.run.state.run_folder import config_copy
from finetune.runtime.text.redact import (
    REDACTED,
    comparable_config,
    redact_foreign,
    redacted_command,
    redacted_config,
    redacted_variables,
    redacted_yaml,
)
from finetune.runtime.text.terminal import format_json, printable

SECRETS = ("canary77", "ca7", "7Zx+/=q", "correct horse battery")
"""Of a length that is searched for, a short one, base64, and one with blanks."""

NAMES = ("hub-token", "DB_PASS")


def in_shell(command: str) -> str:
    """Return the command quoted as a word for another shell."""
    return f"sh -c {shlex.quote(command)}"


_WORDS: dict[str, Callable[[str, str], str]] = {
    "assigned": lambda name, secret: f"push {name}={shlex.quote(secret)}; x",
    "option with =": lambda name, secret: f"push --{name}={shlex.quote(secret)} --keep",
    "option with a blank": lambda name, secret: f"push --{name} {shlex.quote(secret)} --keep",
    "double quotes": lambda name, secret: f'push --{name}="{secret}"; x',
    "exported": lambda name, secret: "export {}='{}'; push".format(name.upper().replace("-", "_"), secret),
    "JSON in a string": lambda name, secret: f"push {json.dumps({name: secret, 'n': 1})}",
    "JSON in JSON": lambda name, secret: json.dumps({"body": json.dumps({name: secret})}),
    "JSON in a quoted word": lambda name, secret: f"push {shlex.quote(json.dumps({'a': [{name: secret}]}))}",
    "quotes in quotes": lambda name, secret: in_shell(f"push --{name}={shlex.quote(secret)}"),
    "quotes in quotes in quotes": lambda name, secret: in_shell(in_shell(f"push --{name} {shlex.quote(secret)}")),
    "header": lambda name, secret: f'curl -H "Authorization: Bearer {secret.replace(" ", "-")}" x',
    "password of a URL": lambda name, secret: f"push https://me:{secret.replace(' ', '%20').replace('/', '%2F')}@h/x",
    "parameter of a URL": lambda name, secret: f"push 'https://h/x?a=1&token={secret.replace(' ', '%20')}&b=2'",
    "Python": lambda name, secret: "python -c " + shlex.quote(f"login({name.replace('-', '_')}={secret!r}, n=1)"),
    "list of words as JSON": lambda name, secret: json.dumps(["push", f"--{name}", secret, "--keep"]),
    "variables as JSON": lambda name, secret: json.dumps([{"name": "A_KEY", "value": secret}, {"name": "B"}]),
}
_VALUES: dict[str, Callable[[str, str], object]] = {
    "mapping": lambda name, secret: {"a": 1, name: secret},
    "nested mapping": lambda name, secret: {"a": {"b": [{name: secret}, 2]}},
    "list under the name": lambda name, secret: {name: ["x", secret]},
    "mapping under the name": lambda name, secret: {name: {"user": "me", "word": secret}},
    "list of words": lambda name, secret: ["push", f"--{name}", secret],
    "list of URLs": lambda name, secret: [f"https://u:{secret.replace(' ', '%20').replace('/', '%2F')}@h/x", "y"],
    "list of variables": lambda name, secret: [{"name": "MY_TOKEN", "value": secret}],
    "assigned in a list": lambda name, secret: [f"{name}={shlex.quote(secret)}"],
}
PLACES = {**_WORDS, **_VALUES}


def leaks(text: str, secret: str) -> bool:
    """Return whether any word of the secret remains in the text, in any quoting."""
    return any(word in text for word in (secret.split(" ")[0], secret.split(" ")[-1]) if word)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoadedConfig]:
    """Return a function that loads a small job with these lines or overrides."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n')
    path = folder / "job.yaml"

    def make(*overrides: str, values: str = "{}", tail: str = "") -> LoadedConfig:
        path.write_text(
            "run: {folder: run}\n"
            f"model:\n  from_config:\n    model_type: llama\n    values: {values}\n  tokenizer: {{name: gpt2}}\n"
            "data: {train: {path: rows.jsonl, format: prompt_completion}, max_length: 32}\ntask: {name: sft}\n"
            f"train: {{global_batch_size: 8, microbatch_size: 8, steps: 4, learning_rate: 1e-4}}\n{tail}"
        )
        return load_config(path, overrides)

    return make


def written_of(loaded: LoadedConfig) -> dict[str, str]:
    """Return the texts that a run writes about its job."""
    return {
        "resolved.yaml": resolved_yaml(loaded),
        "config.yaml": config_copy(loaded.text),
        "identity of a checkpoint": format_json(keys_that_must_match(loaded.config)),
        "settings of a checkpoint": format_json(keys_that_may_differ(loaded.config)),
        "tracker": format_json(redacted_config(loaded.config.model_dump())),
    }


def written_of_override(override: str, value: object) -> dict[str, str]:
    """Return the texts that are written and printed for an override by `--set`."""
    key = override.partition("=")[0]
    return {
        "message": override_label(override),
        "command in environment.json": format_json(redacted_command(["train", "--set", override])),
        "command with =": format_json(redacted_command(["train", f"--set={override}"])),
        "printed command": printable(shlex.join(redacted_command(["finetune", "--set", override]))),
        "script": redact_foreign(f"#!/bin/sh\nfinetune --set {shlex.quote(override)}\n"),
        "table": value_text(value),
        "folder name": run_name({key: value, "run.seed": 1}),
        "value in a message": format_value(value),
        "event": format_json(event_fields(Warned(1, override_label(override)), time=0.0)),
        "page": redact_foreign(" ".join(redacted_command(["--set", override]))),
        "variable": format_json(redacted_variables({"ACCELERATE_X": f"--set {shlex.quote(override)}"})),
        "compared with another start": format_json(comparable_config({key: value})),
        "printed JSON": redact_foreign(json.dumps(redacted_config({key: value}), indent=1)),
    }


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_secret_is_redacted_in_every_output(load, place, name):
    for secret in SECRETS:
        value = PLACES[place](name, secret)
        key = "run.on_end" if place in _WORDS else "model.from_config.values.other"
        override = override_text(key, value)
        loaded = load(override)
        in_file = load(values=json.dumps({"other": value}))
        written = {
            **written_of(loaded),
            **{f"{writer}, from the file": text for writer, text in written_of(in_file).items()},
            **written_of_override(override, value),
        }
        assert [(writer, text) for writer, text in written.items() if leaks(text, secret)] == []
        assert all(REDACTED in text or "redacted" in text for text in (written["message"], written["resolved.yaml"]))
        json.loads(written["printed JSON"])
        json.loads(written["event"])


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "yaml",
    [
        "password: SECRET",
        "password: 'SECRET'",
        'password: "SECRET"  # mine',
        "  - api_key: SECRET\n    n: 1",
        "password: |\n  SECRET\n  second\nn: 1",
        "password: >-\n  SECRET\nn: 1",
        "password:\n  SECRET\nn: 1",
        "password:\n- x\n- SECRET\nn: 1",
        "credentials:\n  user: me\n  word: SECRET\nn: 1",
        "password: 'x\n  SECRET'\nn: 1",
        "password: !!str SECRET",
        "password: &a SECRET",
        "{a: 1, password: SECRET}",
        "{a: 1, password: [x, SECRET]}",
        "{a: 1, password:\n  SECRET}",
        "# password: SECRET",
        "a: 1  # token=SECRET",
        "a: 1  # api_key: SECRET",
        "env:\n- name: A_KEY\n  value: 'SECRET'",
        "run: ['push', '--password', 'SECRET']",
        "on_end: 'push --password ''SECRET'''",
    ],
)
def test_the_copy_of_a_job_file_keeps_its_lines_and_no_secret(yaml, secret):
    text = yaml.replace("SECRET", secret)
    if "#" in yaml.partition("SECRET")[0] and "=" in yaml:
        text = yaml.replace("SECRET", shlex.quote(secret))
    cleaned = redacted_yaml(text)
    assert not leaks(cleaned, secret) and cleaned.count("\n") == text.count("\n")
    assert ("n: 1" in text) == ("n: 1" in cleaned)
    assert redacted_yaml(cleaned) == cleaned and not read_yaml(cleaned).problems


@pytest.mark.parametrize(
    "override", ["password: SECRET", "password=!!int SECRET", "a.password=[SECRET", "password SECRET"]
)
@pytest.mark.parametrize("secret", SECRETS)
def test_a_mistake_in_an_override_does_not_repeat_its_secret(load, override, secret):
    with pytest.raises(Exception, match="has 1 problem") as caught:
        load(override.replace("SECRET", secret))
    assert not leaks(printable(str(caught.value)), secret)


@pytest.mark.parametrize(
    "text",
    [
        "pad_token: <pad>, eos_token: </s>, tokens: 1000, max_new_tokens: 8, num_tokens=3, key: 3, keys: [a, b]",
        "--max-new-tokens 128 --tokens 1000 --tokenizer gpt2 --train-tokenizer x",
        '{"pad_token": "<pad>", "token_type_ids": 5, "tokens": 1000, "bos_token_id": 1}',
        "export it: finetune export runs/a --to FOLDER",
        "password=$HUB_PASSWORD --token ${HF_TOKEN} -e API_KEY=$API_KEY",
        "SORTING=a TOKENIZERS_PARALLELISM=false NCCL_DEBUG=INFO",
        "job.yaml, hub_token: there is no such key.",
        "tokens/s 1,234 | loss 2.1 | keys=4 | tokens_per_second=12.5",
    ],
)
def test_texts_without_secrets_are_unchanged(text):
    assert redact_foreign(text) == text


def test_redaction_is_idempotent_and_keeps_json_valid():
    for place, make in PLACES.items():
        once = redacted_config({"a": make("password", "canary77")})
        text = json.dumps(once)
        assert redacted_config(once) == once and redact_foreign(text) == text, place


def test_the_repository_has_no_text_that_is_taken_for_a_secret():
    root = Path(__file__).parents[3]
    files = [*root.glob("finetune/recipes/*.yaml"), *root.glob("accelerate_configs/*"), *root.glob("ds_configs/*")]
    assert len(files) > 30
    assert [file.name for file in files if redacted_yaml(file.read_text()) != file.read_text()] == []
