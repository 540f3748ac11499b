"""A bucket on this machine, by gcp-storage-emulator, which fails now and then: the seed, and the share that fails.

It prints its address, ends with its standard input, and then prints how many requests failed.
"""

import random
import sys
from http import HTTPStatus

from gcp_storage_emulator import server
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects

at, share = random.Random(int(sys.argv[1])), float(sys.argv[2])
handle, close, download = server.Router.handle, server.Response.close, objects.download
failed = []


def unreliable(router, method: str) -> None:
    """Answer a request, or say that the service is unavailable, before doing what it asks for or after it."""
    fails, early = at.random() < share, at.random() < 0.5
    early |= "upload_id" in router._request_handler.path  # the emulator doesn't know how to resume one that is done
    router._request_handler.lost = fails
    if fails and early:
        router._request_handler.rfile.read(int(router._request_handler.headers.get("Content-Length") or 0))
        server.Response(router._request_handler).close()
    else:
        handle(router, method)


def close_or_lose(response) -> None:
    """Send an answer, or another one if it is lost."""
    if response._handler.lost:
        failed.append(response._handler.path)
        response.status, response._content = HTTPStatus.SERVICE_UNAVAILABLE, ""
    close(response)


def download_with_generation(request, response, storage, *args, **kwargs) -> None:
    """TensorStore wants to know which generation of an object it reads, which the emulator tells only as JSON."""
    try:
        found = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = found["generation"]
    except NotFound:
        pass  # the emulator says so
    download(request, response, storage, *args, **kwargs)


if __name__ == "__main__":
    server.Router.handle, server.Response.close = unreliable, close_or_lose
    objects.download = download_with_generation
    for _, methods in server.HANDLERS:
        methods.update({name: download_with_generation for name, answer in methods.items() if answer is download})
    bucket = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    bucket.start()
    print(f"http://127.0.0.1:{bucket._api._httpd.server_address[1]}", flush=True)
    sys.stdin.read()
    print(len(failed), flush=True)
    bucket.stop()
