"""Owns: the server's socket, who has its port instead, and how many connections the system lets it have."""

from __future__ import annotations

import errno
import resource
import socket

import psutil

from laya.errors import ConfigError

OPEN_FILES_LIMIT = 8192  # each may hold a head and a small body


def listen(host: str, port: int) -> socket.socket:
    """The server's socket. Raises ConfigError that names who has the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"Port {port} is in use{_port_owner(port)}. Choose another: --port {port + 1}") from None
        raise ConfigError(f"Can't listen on {host}:{port}: {error.strerror}.") from None
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def allow_connections(limit: int = OPEN_FILES_LIMIT) -> int:
    """Let this process have that many open files, or as many as the system lets it; gives how many it may have.

    The usual soft limit of 1024 is a few hundred clients, each with a connection to its engine.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _port_owner(port: int) -> str:
    """' by NAME (pid N)', as far as this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            here: tuple[object, ...] = tuple(connection.laddr)
            if connection.status == psutil.CONN_LISTEN and here[1:2] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
