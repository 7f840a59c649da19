"""A server on the loopback that speaks the protocol of the Hugging Face Hub."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
import urllib.parse

from huggingface_hub import constants

_ADDRESS = re.compile(
    r"/(?:api/)?(?:models/)?((?:datasets/)?[^/]+/[^/]+)"
    r"(?:/(resolve|revision|tree)/(refs/[^/]+/[^/]+|[^/]+)/?(.*))?"
)
_HARNESSES = (
    "/api/agent-harnesses"  # huggingface_hub asks for it once a day, with its first request
)
COMMITS = {"main": "a" * 40, "older": "b" * 40}


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves {(repository, commit): {file: bytes}} as the Hub does; notes (method, file).

    The repository of a data set begins with datasets/.
    """

    repositories: dict = {}  # noqa: RUF012 (of one test at a time)
    asked: list = []  # noqa: RUF012
    refused = ""  # what is answered by an error, such as "commit"
    large: dict | None = None  # {SHA-256: content} if safetensors go by Git LFS

    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def do_POST(self):
        """Make a repository, say how files are sent, and take a commit."""
        path, _, _ = urllib.parse.unquote(self.path).partition("?")
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        self.asked.append((self.command, path))
        if path == "/api/validate-yaml" and self.refused != "validate-yaml":
            return self.say({"errors": [], "warnings": []})  # to anyone
        if self.headers.get("Authorization") != "Bearer hf_writes" and "validate" not in path:
            return self.refuse(401, None)
        if self.refused and f"/{self.refused}" in path:
            return self.refuse(400, None)
        if path == "/api/repos/create":
            about = json.loads(lines[0])
            repo_id = f"{about['organization']}/{about['name']}"
            self.repositories.setdefault((repo_id, COMMITS["main"]), {})
            return self.say({"url": f"{constants.ENDPOINT}/{repo_id}"})
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(lines[0])["objects"]
            for item in objects:  # those that are there are not sent again
                if item["oid"] not in self.large:
                    href = f"{constants.ENDPOINT}/large/{item['oid']}"
                    item["actions"] = {"upload": {"href": href}}
            return self.say({"objects": objects})
        repo_id, what, revision = re.fullmatch(
            r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit|discussions)/?(.*)", path
        ).groups()
        files = self.repositories[repo_id, COMMITS["main"]]
        if what == "branch":
            self.repositories[repo_id, revision] = dict(files)
            return self.say({})
        if what == "preupload":
            asked = json.loads(lines[0])["files"]
            is_large = [self.large is not None and "safetensors" in file["path"] for file in asked]
            kinds = [{"uploadMode": "lfs" if each else "regular"} for each in is_large]
            about = zip(asked, kinds, strict=True)
            return self.say(
                {
                    "files": [
                        {"path": file["path"], "shouldIgnore": False, **kind}
                        for file, kind in about
                    ]
                }
            )
        if what == "discussions":
            return self.say({"num": 1})
        target = COMMITS.get(revision, revision)
        files = self.repositories.setdefault((repo_id, target), dict(files))
        for line in map(json.loads, lines):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.large[line["value"]["oid"]]
            elif line["key"] == "deletedFile":
                del files[line["value"]["path"]]
        address = f"{constants.ENDPOINT}/{repo_id}"
        self.say({"commitUrl": f"{address}/commit/{'c' * 40}", "commitOid": "c" * 40})

    def do_PUT(self):
        """Take a large file."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append((self.command, self.path))
        self.large[self.path.rpartition("/")[2]] = content
        self.say({})

    def say(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def answer(self, with_body):
        path, _, _ = urllib.parse.unquote(self.path).partition("?")
        if path == _HARNESSES:
            return self.refuse(404, None)
        if path.endswith("/discussions/1"):
            about = {"title": "", "num": 1, "author": {}, "status": "draft", "isPullRequest": True}
            about |= {"createdAt": "2026-01-01T00:00:00.000Z", "events": [],
                      "repo": {"name": path.removeprefix("/api/models/")[: -len("/discussions/1")],
                               "type": "model"}}  # fmt: skip
            about |= {"changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}
            return self.say(about)
        repo_id, what, revision, file = _ADDRESS.fullmatch(path).groups("")
        what, revision = what or "revision", revision or "main"
        self.asked.append((self.command, file))
        if repo_id.endswith("org/gated"):
            return self.refuse(403, "GatedRepo")
        if repo_id.endswith("org/down"):
            return self.refuse(500, None)
        if repo_id not in {known for known, _ in self.repositories}:
            return self.refuse(404, "RepoNotFound")
        commit = COMMITS.get(revision, revision)
        if (repo_id, commit) not in self.repositories:
            return self.refuse(404, "RevisionNotFound")
        files = self.repositories[repo_id, commit]
        if what != "resolve":
            entries = [
                {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": "0"}
                for name, content in files.items()
            ]
            about = {"id": repo_id, "sha": commit, "siblings": entries}
            files = {file: json.dumps(about if what == "revision" else entries).encode()}
        content = files.get(file)
        if content is None:
            return self.refuse(404, "EntryNotFound", commit)
        self.send_response(200)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content[: len(content) // 2] if repo_id == "org/cut" else content)
            self.close_connection = True

    def refuse(self, status, code, commit=None):
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def move_hub(monkeypatch, address):
    """As HF_ENDPOINT does, which huggingface_hub reads when it is imported; it never sleeps."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


@contextlib.contextmanager
def served(repositories, monkeypatch, tmp_path):
    """Serve them to huggingface_hub, which gets a new cache."""
    Hub.asked, Hub.repositories, Hub.refused, Hub.large = [], repositories, "", None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as there:
        threading.Thread(target=there.serve_forever, args=[0.01], daemon=True).start()
        move_hub(monkeypatch, f"http://127.0.0.1:{there.server_port}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield Hub
        there.shutdown()
