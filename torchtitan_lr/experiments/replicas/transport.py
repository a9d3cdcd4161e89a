# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""How a newcomer gets weights and optimizer state from a replica that is ahead.

torchft's transport listens on all interfaces and unpickles what it receives. This one listens on
the configured address only, sends the run's fingerprint first, and loads tensors and plain values
only (``weights_only``).
"""

import hashlib
import io
import json
import threading
import urllib.request
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from torchtitan_lr.errors import ConfigError
from torchtitan_lr.experiments.replicas.fingerprint import Fingerprint, check_same

_DIGEST = "X-Sha256"
_PATIENCE_SECONDS = 10.0


class HealTransport:
    """Serves one state at a time, and fetches one from another replica (torchft's interface).

    Attributes:
        refusal: Why the state of the others must not be loaded: another configuration. torchft
            swallows exceptions of a transport, so the trainer raises this one.
        bytes_received: Bytes of fetched states so far.
    """

    def __init__(self, address: str, fingerprint: Fingerprint) -> None:
        self.refusal: ConfigError | None = None
        self.bytes_received = 0
        self._fingerprint = fingerprint
        self._served: tuple[int, bytes] | None = None
        self._changed = threading.Condition()
        self._server = ThreadingHTTPServer((address, 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="heal", daemon=True).start()

    def metadata(self) -> str:
        """Return the URL under which others reach this transport."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Serve a copy of a state; training may go on while it is fetched.

        Args:
            dst_ranks: Ranks that will fetch it; any may.
            step: The last committed step.
            state_dict: Tensors and plain values.
            timeout: Not needed: only the copy is waited for.
        """
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        with self._changed:
            self._served = step, buffer.getvalue()
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Stop serving; a transfer under way ends, since it has its own reference."""
        self._served = None

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Fetch a state.

        Args:
            src_rank: The rank that serves it.
            metadata: Its :meth:`metadata`.
            step: The step of the state.
            timeout: Longest wait for a single read.

        Returns:
            What was given to :meth:`send_checkpoint` there, on the CPU.

        Raises:
            ConfigError: That run has another configuration; also kept in ``refusal``.
            OSError: The transfer failed.
        """
        seconds = timeout.total_seconds()
        with _open(f"{metadata}/fingerprint", seconds) as answer:
            theirs = json.loads(answer.read())
        try:
            check_same(self._fingerprint, theirs, "the other replicas")
        except ConfigError as error:
            self.refusal = error
            raise
        with _open(f"{metadata}/state/{step}", seconds) as answer:
            wanted, found = answer.headers[_DIGEST], answer.read()
        if hashlib.sha256(found).hexdigest() != wanted:
            raise OSError(f"the state of step {step} arrived damaged")
        self.bytes_received += len(found)
        return torch.load(io.BytesIO(found), map_location="cpu", weights_only=True)

    def shutdown(self, wait: bool = True) -> None:
        """Stop listening.

        Args:
            wait: Not needed: the server's threads end with the process.
        """
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        transport = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = transport.answer(self.path)
                if found is None:
                    self.send_error(404, "not served")
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(found)))
                self.send_header(_DIGEST, hashlib.sha256(found).hexdigest())
                self.end_headers()
                self.wfile.write(found)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing: a heal is logged by the trainer."""

        return Handler

    def answer(self, path: str) -> bytes | None:
        """Return what a path of this server stands for; None if it is not served in time.

        Args:
            path: ``/fingerprint`` or ``/state/STEP``.
        """
        if path == "/fingerprint":
            return json.dumps(self._fingerprint).encode()

        def is_served() -> bool:
            return self._served is not None and path == f"/state/{self._served[0]}"

        with self._changed:
            # A newcomer may ask before this replica has copied its state.
            self._changed.wait_for(is_served, _PATIENCE_SECONDS)
            return self._served[1] if self._served is not None and is_served() else None


def _open(url: str, seconds: float) -> Any:
    """Open a URL of another replica, past the proxies of the environment."""
    if not url.startswith("http://"):
        raise OSError(f"{url} is no transport of this package")
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=seconds)
