# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""A server of Weights & Biases on 127.0.0.1: what a run asks at its start, and then anything."""

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = {"id": "r", "displayName": "d", "historyLineCount": 0}
PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}}
SERVER = {"cliVersionInfo": {"max_cli_version": "9.9.9"}, "features": []}
VIEWER = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class _Handler(BaseHTTPRequestHandler):
    """Answers as a server does, until ``server.broken`` is the answer to everything."""

    def log_message(self, *_):
        pass

    def _body(self):
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data

    def _answer(self):
        body, broken = self._body(), self.server.broken
        status, text = broken or (200, json.dumps(self._found(body)))
        self.server.asked.append((self.path, status))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = do_PUT = _answer

    def _found(self, body):
        if "graphql" not in self.path:
            return {}
        asked = json.loads(body)
        name = (asked.get("variables") or {}).get("name")
        bucket = BUCKET | {"name": name, "project": PROJECT}
        upserted = {"bucket": bucket, "inserted": True}
        files = {"runID": "r", "uploadHeaders": [], "files": []}
        found = {"viewer": VIEWER, "serverInfo": SERVER, "upsertBucket": upserted}
        return {"data": found | {"model": PROJECT | {"bucket": None}, "createRunFiles": files}}


@contextmanager
def wandb_server():
    """Yield a server with ``broken``, None or (status, text), and ``asked``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.broken, server.asked, server.daemon_threads = None, [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
