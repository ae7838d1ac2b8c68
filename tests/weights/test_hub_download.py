"""A whole model over HTTP: huggingface_hub's own client against a small server that answers as the hub does."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from urllib.parse import unquote, urlsplit

import pytest

from tests.pretrained.tiny_model import write_model

NAME, COMMIT = "owner/tiny", "c" * 40
PROGRAM = f"""
import specjax
from specjax.sampling import Sampling
model = specjax.load({NAME!r})
print(model.name, model.generate(["the cat"], max_new_tokens=8, sampling=Sampling.of(0))[0].tokens.tolist())
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """One model at one commit; the folder and the log of what was asked are set on a subclass."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        files = sorted(file.name for file in self.folder.iterdir())
        if path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings, "tags": []}).encode())
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            entries = [{"type": "file", "path": name, "oid": name, "size": self.size(name)} for name in files]
            self.answer(200, json.dumps(entries).encode())
        elif path.startswith(f"/{NAME}/resolve/") and path.rsplit("/", 1)[1] in files:
            content = (self.folder / path.rsplit("/", 1)[1]).read_bytes()
            tag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.answer(200, content, tag)
        else:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def size(self, name):
        return (self.folder / name).stat().st_size

    def answer(self, status, content, headers=()):
        self.send_response(status)
        about = {"Content-Length": len(content), "Content-Type": "application/json"}
        for name, value in (about | dict(headers)).items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(tmp_path):
    write_model(tmp_path / "tiny")
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (tmp_path / "tiny" / name).write_bytes(b"not to be fetched")
    handler = type("TinyHub", (Hub,), {"folder": tmp_path / "tiny", "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server, handler.asked
    server.shutdown()
    server.server_close()


def run(program, endpoint, cache, **more):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    environment = inherited | dict(HF_ENDPOINT=endpoint, HF_HOME=str(cache), HF_HUB_DISABLE_XET="1", **more)
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_model_is_downloaded_used_and_found_again_without_a_network(hub, tmp_path):
    server, asked = hub
    endpoint, cache = f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "cache"
    local = run(PROGRAM.replace(NAME, str(tmp_path / "tiny")), endpoint, cache)
    assert local.returncode == 0 and not asked, local.stderr
    first = run(PROGRAM, endpoint, cache)
    assert first.returncode == 0, first.stderr
    assert first.stdout == local.stdout  # the same name, the same text
    fetched = {line.rsplit("/", 1)[1] for line in asked if line.startswith(f"GET /{NAME}/resolve/")}
    assert fetched == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    asked.clear()
    again = run(PROGRAM, endpoint, cache, HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and again.stdout == first.stdout and not asked, again.stderr
    missing = run(PROGRAM.replace(NAME, "owner/other"), endpoint, cache)
    assert missing.returncode != 0
    assert "the hub has no such model, or it is private" in missing.stderr.splitlines()[-1]
