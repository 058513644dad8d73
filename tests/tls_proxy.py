"""Encryption in front of a server that has none: what many put before a broker, and what the tests' broker needs."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trustme


@contextmanager
def encrypted(port: int, authority: trustme.CA) -> Iterator[int]:
    """Another port on loopback, which takes encrypted connections for the server on `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                plain, _ = listener.accept()
                opened.append(plain)
                with suppress(OSError):
                    outside = context.wrap_socket(plain, server_side=True)
                    inside = socket.create_connection(("127.0.0.1", port))
                    opened.extend((outside, inside))
                    for ends in ((outside, inside), (inside, outside)):
                        threading.Thread(target=pump, args=ends, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for end in opened:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
