"""Owns: a Laya in a process of its own that also tells where its engine listens, so that both can be asked the same.

    python -m laya.bench.served_engine MODEL [--config FILE] [--url URL] [settings, as `laya serve` takes them]

Everything of `laya serve` is in place. Once the model is ready it prints one line of JSON: the port and key here, and
how the engine itself is reached. Whoever starts this may ask that engine directly; nobody else learns its key.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import msgspec

from laya.config import ApiKey, Config, data_dir, load_config, parse_engine_flags, parse_settings, with_settings
from laya.config.keys import hash_key
from laya.engines.child_start import die_with_parent
from laya.errors import LayaError
from laya.gateway.endpoint import Endpoint
from laya.gateway.listening import listen
from laya.gateway.server import Gateway, run


def configured(model: str, file: Path | None, url: str | None, flags: list[str], key: str) -> Config:
    """The configuration of `laya serve`, with one key, and with the model as another server's where `url` is said."""
    config = with_settings(load_config(file, os.environ), parse_engine_flags(flags))
    if url is not None:
        remote = parse_settings({"engine": "remote", "url": url})
        config = msgspec.structs.replace(config, models=config.models | {model: remote})
    server = msgspec.structs.replace(config.server, api_keys=[ApiKey(name="bench", sha256=hash_key(key))])
    return msgspec.structs.replace(config, server=server)


def told(gateway: Gateway, endpoint: Endpoint, port: int, key: str) -> dict[str, Any]:
    """What the parent needs: both ways to the engine, and what it runs with."""
    assert endpoint.pool is not None and endpoint.planned is not None
    address = endpoint.pool.address
    return {
        "port": port,
        "key": key,
        "model": endpoint.model_id,
        "engine": endpoint.settings.engine,
        "settings": msgspec.to_builtins(endpoint.planned),
        "bare": {
            "host": address.host,
            "port": address.port,
            "key": address.api_key,
            "model": address.model or endpoint.model_id,
            "base_path": address.base_path,
            "headers": address.headers,
            "is_tls": address.tls is not None,
        },
    }


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--url")
    options, flags = parser.parse_known_args()
    key, sock = secrets.token_hex(16), listen("127.0.0.1", 0)
    port = sock.getsockname()[1]

    def say(gateway: Gateway, endpoint: Endpoint) -> None:
        print(json.dumps(told(gateway, endpoint, port, key)), flush=True)

    try:
        config = configured(options.model, options.config, options.url, flags, key)
        home = data_dir(os.environ)
        return run(config, home=home, sock=sock, preload=[options.model], on_loaded=say, on_ready=lambda gateway: None)
    except LayaError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
