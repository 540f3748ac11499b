"""A Hugging Face hub of our own: it answers what `huggingface_hub` asks of data sets and models, and takes models."""

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse

import pyarrow as pa
import pyarrow.parquet as pq

CONVERTED = "refs/convert/parquet"


def parquet(texts) -> bytes:
    """A Parquet file with a column `text`."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": list(texts)}), sink, row_group_size=100)
    return sink.getvalue().to_pybytes()


class Hub(http.server.ThreadingHTTPServer):
    """The server, which answers as long as this process lives. Tests change what it has.

    Who asks it sets HF_ENDPOINT to its address before `huggingface_hub` is imported.

    repositories: name of a data set or model -> branch -> path of a file -> its content.
    stated: path of a file -> the SHA-256 that the hub states in place of the file's own; None for no statement.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.stated = {}, {}
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def commit(self, dataset: str, branch: str) -> str:
        """The commit that a branch is at, which follows from its files."""
        return hashlib.sha1(repr(sorted(self.repositories[dataset][branch].items())).encode()).hexdigest()

    def revision(self, dataset: str, name: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, or of a commit that a branch is at; None if there is none."""
        for branch, files in self.repositories.get(dataset, {}).items():
            if name in (branch, commit := self.commit(dataset, branch)):
                return commit, files
        return None

    def entry(self, path: str, content: bytes) -> dict:
        """How the hub lists a file."""
        sha256 = self.stated.get(path, hashlib.sha256(content).hexdigest())
        lfs = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 100}} if sha256 else {}
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest(), **lfs}


class Handler(http.server.BaseHTTPRequestHandler):
    """Three questions: which commit is a branch at, which files has it, and what is in one of them."""

    def do_GET(self):
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[api + (parts[api] in ("datasets", "models")) :]
        if len(parts) < 3:
            return self.send_error(404)
        dataset, what, rest = "/".join(parts[:2]), parts[2], "/".join(parts[3:])
        found = self.server.revision(dataset, rest if api else rest.split("/")[0])
        headers, content = {}, None
        if not found:
            headers["X-Error-Code"] = "RevisionNotFound" if dataset in self.server.repositories else "RepoNotFound"
        else:
            commit, files = found
            headers |= {"X-Repo-Commit": commit, "X-Error-Code": "EntryNotFound"}
            if what == "revision":
                content = json.dumps({"id": dataset, "sha": commit}).encode()
            elif what == "tree":
                folders = [{"type": "directory", "path": "a", "oid": "0"}]
                content = json.dumps(folders + [self.server.entry(*file) for file in files.items()]).encode()
            else:
                content = files.get(rest.partition("/")[2])
        if content is not None:
            headers |= {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Content-Length": str(len(content))}
            headers.pop("X-Error-Code", None)
        self.send_response(200 if content is not None else 404)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if content is not None and self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def do_POST(self):
        """A new model, whether its card is valid, how its files are to be sent, and a commit of them."""
        if self.headers["Authorization"] != "Bearer writes":
            return self.send_error(403)
        lines = [json.loads(line) for line in self.rfile.read(int(self.headers["Content-Length"])).splitlines()]
        [_, *name, what] = self.path.removesuffix("/main").strip("/").split("/")
        name = "/".join(name[1:])
        if what == "create":
            name = f"{lines[0].get('organization') or 'me'}/{lines[0]['name']}"
            exists = name in self.server.repositories
            self.server.repositories.setdefault(name, {"main": {}})
            return self.answer({"url": f"{self.server.address}/{name}"}, 409 if exists else 200)
        if what == "validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if what == "preupload":
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in lines[0]["files"]
            ]
            return self.answer({"files": files})
        sent = [line["value"] for line in lines if line["key"] == "file"]
        self.server.repositories[name]["main"] |= {each["path"]: base64.b64decode(each["content"]) for each in sent}
        self.answer({"commitUrl": f"{self.server.address}/{name}/commit/{40 * '0'}", "commitOid": 40 * "0"})

    def answer(self, found: dict, status: int = 200) -> None:
        content = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass
