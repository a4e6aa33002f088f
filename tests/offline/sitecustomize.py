"""Refuse all connections that leave this machine, in the tests and in every Python
process that they start.

Plugins for this guard only the process of the tests, but most tests are about commands,
each in its own process, which imports this `sitecustomize`. A refused host looks as it
does on a machine without network.
"""

import ipaddress
import sys
from typing import Any

_EVENTS = frozenset({"socket.getaddrinfo", "socket.connect", "socket.sendto"})


def _leaves(host: object) -> bool:
    if not isinstance(host, str | bytes) or not host:
        return False  # a Unix socket; an empty name is this machine
    name = host.decode() if isinstance(host, bytes) else host
    try:
        return not ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name != "localhost"


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    # first, as there are a hundred other events for each of these
    if event not in _EVENTS:
        return
    host = None
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif isinstance(arguments[1], tuple):
        host = arguments[1][0]
    if host is not None and _leaves(host):
        raise ConnectionRefusedError(f"tests use no network: {host!r}")


sys.addaudithook(_refuse)
