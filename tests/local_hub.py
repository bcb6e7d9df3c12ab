"""A hub on this machine that keeps repositories as folders. It speaks what huggingface_hub 2.4
needs for `whoami`, `create_repo`, `repo_info` and `upload_folder` with Git LFS.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

TOKENS = {"hf_write": "write", "hf_read": "read"}


class LocalHub:
    """Serves `folder`: OWNER/NAME/... are the files of the only branch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.private, self.commits = folder, {}, []
        self.large: dict[str, bytes] = {}
        self.refuses_to_create = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        files = (self.folder / repo).rglob("*")
        return {f.name: f.read_bytes() for f in files if f.is_file()}

    def commit(self, repo: str, lines: list[dict]) -> None:
        for line in lines:
            value, path = line["value"], self.folder / repo / line["value"].get("path", "")
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                path.write_bytes(self.large[value["oid"]])
            elif line["key"] == "deletedFile":
                path.unlink()
            else:
                raise NotImplementedError(line["key"])


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args):
        pass

    def answer(self, value, code=200, **headers):
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, code, message, **headers):
        self.answer({"error": message}, code, X_Error_Message=message, **headers)

    def handle_request(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub, path = self.hub, self.path.partition("?")[0]
        if self.command == "PUT":  # the address of a large file needs no token
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            hub.large[oid] = body
            return self.answer({})
        role = TOKENS.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))
        if role is None:
            return self.refuse(401, "Invalid credentials in Authorization header")
        if path == "/api/whoami-v2":
            auth = {"accessToken": {"role": role}}
            return self.answer({"name": "ada", "orgs": [{"name": "lab"}], "auth": auth})
        if path == "/api/validate-yaml":  # the front matter of the card
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            if hub.refuses_to_create:
                return self.refuse(403, "You don't have the rights to create a model")
            code = 409 if repo in hub.private else 200
            hub.private.setdefault(repo, asked["visibility"] == "private")
            (hub.folder / repo).mkdir(parents=True, exist_ok=True)
            return self.answer({"url": f"{hub.url}/{repo}"}, code)
        repo = re.match(r"/(?:api/models/)?([\w-]+/[\w-]+)", path)[1]
        if repo not in hub.private:
            return self.refuse(404, "Repository not found", X_Error_Code="RepoNotFound")
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self.answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}} for o in objects
            ]
            return self.answer({"transfer": "basic", "objects": upload})
        if path.endswith("/commit/main"):
            hub.commit(repo, [json.loads(line) for line in body.splitlines()])
            url = f"{hub.url}/{repo}/commit/{len(hub.commits):040x}"
            return self.answer({"success": True, "commitUrl": url, "commitOid": url[-40:]})
        if "/tree/" in path:
            files = hub.files(repo).items()
            return self.answer(
                [{"type": "file", "path": n, "size": len(b), "oid": "0" * 40} for n, b in files]
            )
        if path == f"/api/models/{repo}":
            return self.answer({"id": repo, "private": hub.private[repo], "siblings": []})
        return self.refuse(501, f"{self.command} {self.path}")

    do_GET = do_POST = do_PUT = handle_request
