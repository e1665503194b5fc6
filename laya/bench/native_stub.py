"""Owns: the stub engine of `stub_engine.py` in the native core: the same bytes, several times as fast.

Prints its address. Run: `python -m laya.bench.native_stub --chunks 64`.
"""

from __future__ import annotations

import argparse
import json

from laya._core import StubEngine
from laya.bench import stub_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--chunks-a-write", type=int, default=1)
    args = parser.parse_args()
    head, *rest = stub_engine.stream_pieces(args.chunks)
    n = args.chunks_a_write
    pieces = [head, *(b"".join(rest[at : at + n]) for at in range(0, len(rest), n))]
    if len(rest) <= n:
        pieces = [b"".join(pieces)]
    engine = StubEngine(stub_engine.whole_answer(), stub_engine.ALIVE, stub_engine.COUNT, pieces)
    print(json.dumps({"port": engine.port}), flush=True)
    engine.run()


if __name__ == "__main__":
    main()
