"""Owns: `laya bench soak`: a long time of everything at once, and whether anything is left of it.

With real engines for `--minutes`, or with `--requests` before a stub engine. Exits with 1 where something
leaked, an answer was none, or the outcomes do not sum to the arrivals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from laya.bench.hardware import hardware
from laya.bench.help import description
from laya.bench.soak_engines import N_CLIENTS, engines_soak, shown
from laya.bench.soak_stub import LEAST_REQUESTS, stub_soak
from laya.errors import LayaError
from laya.models import resolve


def _vocabulary(given: Path | None) -> Path:
    """The default model's file. Exits where it is not here."""
    try:
        return given or resolve("smollm2").path
    except LayaError as error:
        raise SystemExit(f"{error.message} Or name its file: --model") from None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="laya bench soak", description=description(__doc__))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak with real engines")
    parser.add_argument("--stub", action="store_true", help="before a stub engine instead")
    parser.add_argument("--requests", type=int, default=100_000, help="of the soak before a stub engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, metavar="GGUF", help="a small chat model; default: smollm2, if pulled")
    args = parser.parse_args(argv)
    if args.stub and args.requests < LEAST_REQUESTS:
        parser.error(f"--requests {args.requests} are too few to see whether memory grows: {LEAST_REQUESTS} or more")
    if args.stub:
        layer, load = "sockets of the gateway, a stub engine behind it", {"requests": args.requests}
        report = stub_soak(args.requests)
    else:
        layer = "laya serve with llama.cpp: three models that take turns, killed, reloaded and left"
        load = {"minutes": args.minutes, "clients": N_CLIENTS, "seed": args.seed}
        report = engines_soak(_vocabulary(args.model), args.minutes * 60, seed=args.seed)
        log = report.pop("log")
        if not args.json:
            print(log)
    if not args.json:
        print(shown(report))
    print(json.dumps({"bench": "soak", "layer": layer, "load": load} | report | {"hardware": hardware()}))
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
