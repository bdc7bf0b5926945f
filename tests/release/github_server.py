# SPDX-License-Identifier: Apache-2.0
"""The part of GitHub's API that releases need, on a Unix socket, for the real gh to talk to.

    github_server.py SOCKET FOLDER

State is FOLDER/state.json and FOLDER/assets/, so that a test sees it, also after a kill. A file
FOLDER/fail names requests that get an error ("POST assets 3": from the third of its kind on).
"""

import contextlib
import hashlib
import http.server
import json
import pathlib
import re
import socketserver
import sys
import threading
import urllib.parse

BASE = "https://api.github.com/repos/someone/tiercel"
UPLOADS = "https://uploads.github.com/repos/someone/tiercel"


class State:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        (folder / "assets").mkdir(exist_ok=True)
        self.file = folder / "state.json"
        self.releases, self.tags, self.requests, self.next_id = [], {}, [], 1
        self.save()

    def save(self) -> None:
        known = {"releases": self.releases, "tags": self.tags, "requests": self.requests}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(known, indent=1))
        part.replace(self.file)

    def number(self) -> int:
        self.next_id += 1
        return self.next_id

    def find(self, key: str, value) -> dict | None:
        return next((r for r in self.releases if r[key] == value), None)

    def fails(self, kind: str) -> bool:
        self.requests.append(kind)
        self.save()
        wish = self.folder / "fail"
        name, _, first = wish.read_text().rpartition(" ") if wish.exists() else ("", "", "")
        return name == kind and self.requests.count(kind) >= int(first)


def shown(release: dict) -> dict:
    number = release["id"]
    return release | {
        "url": f"{BASE}/releases/{number}",
        "html_url": f"https://github.com/someone/tiercel/releases/tag/{release['tag_name']}",
        "upload_url": f"{UPLOADS}/releases/{number}/assets{{?name,label}}",
        "author": {"login": "someone", "id": 1},
        "node_id": f"R_{number}",
        "published_at": None if release["draft"] else "2026-01-01T00:00:00Z",
    }


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_arguments) -> None:
        pass

    def reply(self, code: int, body=None) -> None:
        data = b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        chunks = self.rfile.read(length) if length else b""
        address = urllib.parse.urlsplit(self.path)
        path = address.path.removeprefix("/repos/someone/tiercel")
        query = dict(urllib.parse.parse_qsl(address.query))
        with (
            self.state.lock,
            contextlib.suppress(ConnectionError),
        ):  # gh hangs up on what it gave up
            for method, pattern, act in ROUTES:
                match = re.fullmatch(pattern, path)
                if method == self.command.replace("HEAD", "GET") and match:
                    kind = f"{method} {act.__name__}"
                    if self.headers.get("Authorization") != "token gh-secret":
                        self.reply(401, {"message": "Bad credentials"})
                    elif self.state.fails(kind):
                        self.reply(500, {"message": "told to fail"})
                    else:
                        answer = act(self.state, match, query, chunks)
                        self.state.save()  # before gh knows, and the test looks
                        self.reply(*answer)
                    return
            self.state.requests.append(f"UNKNOWN {self.command} {self.path} {chunks[:2000]!r}")
            self.state.save()
            self.reply(404, {"message": "Not Found"})

    do_GET = do_HEAD = do_POST = do_PATCH = do_DELETE = handle_any  # noqa: N815


NOT_FOUND = (404, {"message": "Not Found"})


def by_tag(state: State, match, query, body):
    release = state.find("tag_name", match[1])
    return (200, shown(release)) if release and not release["draft"] else NOT_FOUND


def by_id(state: State, match, query, body):
    release = state.find("id", int(match[1]))
    return (200, shown(release)) if release else NOT_FOUND


def listed(state: State, match, query, body):
    return 200, [shown(release) for release in state.releases]


def create(state: State, match, query, body):
    wanted = json.loads(body)
    release = {"id": state.number(), "assets": [], "body": "", "name": "", "draft": False}
    release |= {
        "prerelease": False,
        "target_commitish": "main",
        "created_at": "2026-01-01T00:00:00Z",
    }
    release |= {key: value for key, value in wanted.items() if key in release or key == "tag_name"}
    state.releases.append(release)
    publish(state, release)
    return 201, shown(release)


def publish(state: State, release: dict) -> None:
    if not release["draft"]:
        state.tags.setdefault(release["tag_name"], release["target_commitish"])


def edit(state: State, match, query, body):
    release = state.find("id", int(match[1]))
    if not release:
        return NOT_FOUND
    wanted = json.loads(body)
    release.update({key: value for key, value in wanted.items() if key in release})
    publish(state, release)
    return 200, shown(release)


def delete(state: State, match, query, body):
    state.releases = [r for r in state.releases if r["id"] != int(match[1])]
    return 204, None


def assets(state: State, match, query, body):
    release = state.find("id", int(match[1]))
    if any(asset["name"] == query["name"] for asset in release["assets"]):
        return 422, {"message": "Validation Failed", "errors": [{"code": "already_exists"}]}
    number = state.number()
    (state.folder / "assets" / str(number)).write_bytes(body)
    asset = {"id": number, "name": query["name"], "size": len(body), "state": "uploaded"}
    asset |= {"label": "", "digest": "sha256:" + hashlib.sha256(body).hexdigest()}
    asset |= {"url": f"{BASE}/releases/assets/{number}", "content_type": "application/zip"}
    asset |= {"browser_download_url": f"https://github.com/{number}", "download_count": 0}
    asset |= {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}
    asset["node_id"] = f"RA_{number}"
    release["assets"].append(asset)
    return 201, asset


def gpu_runs(state: State, match, query, body):
    """All commits have passed, unless the test says otherwise."""
    passed = {"status": "completed", "conclusion": "success", "head_branch": "main"}
    passed["html_url"] = "https://github.com/someone/tiercel/actions/runs/1"
    file = state.folder / "gpu_runs.json"
    return 200, {"workflow_runs": json.loads(file.read_text()) if file.exists() else [passed]}


def delete_asset(state: State, match, query, body):
    for release in state.releases:
        release["assets"] = [a for a in release["assets"] if a["id"] != int(match[1])]
    return 204, None


def move_tag(state: State, match, query, body):
    wanted = json.loads(body)
    if match[1] not in state.tags or not wanted.get("force"):
        return 422, {"message": "Reference does not exist"}
    state.tags[match[1]] = wanted["sha"]
    return 200, {"ref": f"refs/tags/{match[1]}"}


def graphql(state: State, match, query, body):
    """gh asks for a draft of that tag, and what a repository can do."""
    asked = json.loads(body)
    tag = (asked.get("variables") or {}).get("tagName", "")
    release = state.find("tag_name", tag)
    found = {"databaseId": release["id"], "isDraft": release["draft"]} if release else None
    return 200, {"data": {"repository": {"release": found, "ref": None}}}


ROUTES = [
    ("GET", r"/releases/tags/([^/]+)", by_tag),
    ("GET", r"/releases/(\d+)", by_id),
    ("GET", r"/releases", listed),
    ("POST", r"/releases", create),
    ("PATCH", r"/releases/(\d+)", edit),
    ("DELETE", r"/releases/(\d+)", delete),
    ("POST", r"/releases/(\d+)/assets", assets),
    ("DELETE", r"/releases/assets/(\d+)", delete_asset),
    ("PATCH", r"/git/refs/tags/([^/]+)", move_tag),
    ("GET", r"/actions/workflows/gpu\.yml/runs", gpu_runs),
    ("POST", r"/graphql", graphql),
]


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def main() -> None:
    Handler.state = State(pathlib.Path(sys.argv[2]))
    with Server(sys.argv[1], Handler) as server:
        print("ready", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
