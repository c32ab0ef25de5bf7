# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server of the metrics page and of the snapshots, on a thread of its own."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.process_collector import ProcessCollector

from kvpass.errors import ConfigError, MetricsError
from kvpass.metrics.collector import Collector
from kvpass.metrics.page import page, write_page

DEFAULT_PORT = 9464
"""The port of Prometheus exporters of OpenTelemetry."""


class MetricsServer:
    """A running server; also a context manager that closes it.

    Attributes:
        host: address it is bound to.
        port: port it listens on.
    """

    def __init__(self, server: WSGIServer, host: str) -> None:
        self.host = host
        self.port: int = server.server_port
        self._server = server
        self._process = os.getpid()
        self._thread: threading.Thread | None = threading.Thread(
            target=server.serve_forever, args=(0.1,), name="kvpass-metrics", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening and free the port; safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # A forked child has the socket, but not the thread that would answer a shutdown.
        if self._process == os.getpid():
            self._server.shutdown()
            thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        """Return the server itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the server."""
        self.close()


def serve_metrics(port: int = DEFAULT_PORT, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics of all live caches of this process until the process ends.

    ``/metrics`` (and ``/``) is the page for Prometheus, ``/snapshot`` the same as JSON.

    Args:
        port: to listen on; 0 picks a free one.
        host: address to bind to; only this machine reaches the default. Nothing asks who reads,
            so give another one only inside a network that you trust.

    Returns:
        The server, with its ``port`` and ``close()``; it runs on whether it is kept or not.

    Raises:
        ConfigError: ``port`` is not a whole number from 0 to 65535, or ``host`` is empty.
        MetricsError: the port is in use or not allowed, or the address is not of this machine.
    """
    check_address(port, host)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        kind = type("_Family", (_Server,), {"address_family": family})
        server: WSGIServer = make_server(
            host, port, application(), server_class=kind, handler_class=_Quiet
        )
    except OSError as error:
        raise MetricsError(
            f"metrics cannot be served on {host}, port {port}: {error.strerror or error}; give "
            "another port (0 picks a free one), or end the program that has this one"
        ) from error
    return MetricsServer(server, host)


def check_address(port: object, host: object) -> None:
    """Refuse a port or a host that cannot be one.

    Raises:
        ConfigError: see :func:`serve_metrics`.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"port = {port!r}: write a whole number from 0 to 65535")
    if not isinstance(host, str) or not host.strip():
        raise ConfigError(f"host = {host!r}: write an address, as '127.0.0.1'")


def application() -> Callable[..., Iterable[bytes]]:
    """The WSGI application that is served; mount it in a server of your own as you like."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(Collector())
    metrics = make_wsgi_app(registry)

    def respond(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO") or "/"
        if path in ("/", "/metrics"):
            return metrics(environ, start_response)
        if path == "/snapshot":
            status, kind, body = "200 OK", "application/json", write_page(page())
        else:
            status, kind = "404 Not Found", "text/plain; charset=utf-8"
            body = f"nothing at {path}: there are /metrics and /snapshot\n"
        start_response(status, [("Content-Type", kind)])
        return [body.encode()]

    return respond


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind as WSGIServer does, without its look-up of the host's name, which may hang."""
        # With SO_REUSEADDR: connections of a closed server must not keep the port for a minute.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: stderr belongs to the program."""
