"""Owns: a process with the core's bare relay in it: bytes to the engine and back, unread. What no gateway can be below.

Prints its address. Run: `python -m laya.bench.bare_relay --engine-port N`.
"""

from __future__ import annotations

import argparse
import json

from laya._core import BareRelay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-port", type=int, required=True)
    relay = BareRelay(parser.parse_args().engine_port)
    print(json.dumps({"port": relay.port}), flush=True)
    relay.run()


if __name__ == "__main__":
    main()
