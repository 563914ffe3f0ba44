"""Serves a directory over TLS on the loopback: serve.py PORT DIRECTORY CERTIFICATE, whose key is in the same file."""

from __future__ import annotations

import functools
import http.server
import ssl
import sys

port, directory, certificate = sys.argv[1:]
# Connections stay open for the next question.
http.server.SimpleHTTPRequestHandler.protocol_version = "HTTP/1.1"
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=directory)
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificate)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
