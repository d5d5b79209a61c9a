"""A web server on a free port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve(reply: Callable[[BaseHTTPRequestHandler, bool], None]) -> tuple[ThreadingHTTPServer, str]:
    """The running server and its address; `reply(request, send_body)` answers GET, and without a body HEAD."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            reply(self, True)

        def do_HEAD(self):
            reply(self, False)

        def log_message(self, *args):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    return http, f"http://127.0.0.1:{http.server_port}"
