"""An upload speaks to a hub on this machine, which says what the real one would."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from huggingface_hub import constants

from finetune.errors import HubError
from finetune.export import save
from finetune.export.save import push_folder
from tests.refusals import refused

TOKEN = "hf_" + "a" * 34


class Hub(BaseHTTPRequestHandler):
    """Creates repositories and takes commits of small files, for one token; remembers what it was asked."""

    asked: ClassVar[list] = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.asked.append((self.path, body))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.say(401, {"error": "Invalid credentials in Authorization header"})
        here = f"http://{self.headers['Host']}/me/model"
        if self.path == "/api/repos/create":
            return self.say(200, {"url": here})
        if self.path.endswith("/preupload/main"):
            files = [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in json.loads(body)["files"]]
            return self.say(200, {"files": files})
        if "/commit/" in self.path:
            return self.say(200, {"commitUrl": f"{here}/commit/1", "commitOid": "1" * 40, "success": True})
        return self.say(200, {"valid": True})

    def do_GET(self):
        self.asked.append((self.path, b""))
        self.say(200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "name": "me", "type": "user", "orgs": []})

    def say(self, code, answer):
        text = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch):
    """The address of a hub that is reached in place of the real one."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    Hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(save, "is_offline", lambda: False)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield address
    server.shutdown()
    thread.join()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "config.json").write_text("{}")
    (tmp_path / "final" / "README.md").write_text("---\nlibrary_name: transformers\n---\n")
    return tmp_path / "final"


def test_a_folder_becomes_a_commit_in_a_private_repository(hub, folder):
    assert push_folder(folder, "me/model", private=True) == f"{hub}/me/model"
    (created,) = [json.loads(body) for path, body in Hub.asked if path == "/api/repos/create"]
    assert (created["name"], created["organization"]) == ("model", "me")
    assert created.get("private") is True or created.get("visibility") == "private"  # hubs older and newer
    (commit,) = [body.decode() for path, body in Hub.asked if "/commit/" in path]
    assert '"path":"config.json"' in commit.replace(" ", "") and '"path":"README.md"' in commit.replace(" ", "")


def test_a_hub_token_without_permission_is_one_message_without_the_token(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "b" * 34)
    again = f"finetune export {folder} --push-to-hub me/model"
    with refused(HubError, "`me/model`", "HF_TOKEN", "`hf auth login`", again, varies=True) as told:
        push_folder(folder, "me/model", private=True)
    assert "hf_b" not in str(told.value) and "\n" not in str(told.value)


def test_a_missing_hub_token_is_reported(hub, folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with refused(HubError, "HF_TOKEN", varies=True):
        push_folder(folder, "me/model", private=True)


def test_an_invalid_repository_name_is_rejected(hub, folder):
    with refused(HubError, "`me/my/model`"):
        push_folder(folder, "me/my/model", private=True)


def test_an_unreachable_hub_is_reported_before_uploading(folder, monkeypatch):
    monkeypatch.setattr(save, "is_offline", lambda: True)
    with refused(HubError, folder):
        push_folder(folder, "me/model", private=True)


def test_a_hub_that_closes_the_connection_is_reported(folder, monkeypatch):
    monkeypatch.setattr(save, "is_offline", lambda: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with refused(HubError, "`me/model`", varies=True):
        push_folder(folder, "me/model", private=True)
