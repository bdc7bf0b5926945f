# SPDX-License-Identifier: Apache-2.0
"""A package index on the loopback (pypiserver), as tests need it.

    index_server.py FOLDER        prints its address; log of requests in FOLDER.log

INDEX_USER and INDEX_PASSWORD may upload.
"""

import io
import os
import pathlib
import socketserver
import sys
import wsgiref.simple_server

import pypiserver


class _Server(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True


def _whole(app):
    """pypiserver keeps what came of a file whose sender was killed; a public index refuses it."""

    def answer(environ: dict, start_response):
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size)
        if len(body) < size:
            start_response("400 Bad Request", [])
            return []
        return app(environ | {"wsgi.input": io.BytesIO(body)}, start_response)

    return answer


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    credentials = (os.environ["INDEX_USER"], os.environ["INDEX_PASSWORD"])
    log = folder.with_suffix(".log").open("a", buffering=1)

    class Handler(wsgiref.simple_server.WSGIRequestHandler):
        def log_message(self, text: str, *arguments) -> None:
            log.write(text % arguments + "\n")

    app = pypiserver.app(
        roots=[folder],
        authenticate=["update"],
        auther=lambda *said: said == credentials,
        disable_fallback=True,
        overwrite=False,
    )
    options = {"server_class": _Server, "handler_class": Handler}
    with wsgiref.simple_server.make_server("127.0.0.1", 0, _whole(app), **options) as server:
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
