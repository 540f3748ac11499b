"""A Hugging Face hub of our own: it answers what `huggingface_hub` asks of data sets, with files of the hub's names."""

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

    datasets: name of a data set -> branch -> path of a file -> its content.
    stated: path of a file -> the SHA-256 that the hub states in place of the file's own; None for no statement.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.datasets, self.stated = {}, {}
        self.address = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def commit(self, dataset: str, branch: str) -> str:
        """The commit that a branch is at, which follows from its files."""
        return hashlib.sha1(repr(sorted(self.datasets[dataset][branch].items())).encode()).hexdigest()

    def revision(self, dataset: str, name: str) -> tuple[str, dict[str, bytes]] | None:
        """Commit and files of a branch, or of a commit that a branch is at; None if there is none."""
        for branch, files in self.datasets.get(dataset, {}).items():
            if name in (branch, commit := self.commit(dataset, branch)):
                return commit, files
        return None

    def entry(self, path: str, content: bytes | None) -> dict:
        """How the hub lists a file, also one that it can't give."""
        content = content or b""
        sha256 = self.stated.get(path, hashlib.sha256(content).hexdigest())
        lfs = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 100}} if sha256 else {}
        return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest(), **lfs}


class Handler(http.server.BaseHTTPRequestHandler):
    """Three questions: which commit is a branch at, which files has it, and what is in one of them."""

    def do_GET(self):
        parts = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/").split("/")
        if "datasets" not in parts[:2]:
            return self.send_error(404)
        api = parts[0] == "api"
        dataset, what, rest = "/".join(parts[1 + api : 3 + api]), parts[3 + api], "/".join(parts[4 + api :])
        found = self.server.revision(dataset, rest if api else rest.split("/")[0])
        headers, content = {}, None
        if not found:
            headers["X-Error-Code"] = "RevisionNotFound" if dataset in self.server.datasets else "RepoNotFound"
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

    def log_message(self, *arguments):
        pass
