"""Owns: `tools/benchmark_router.py`: what the request router costs, measured at three layers and never mixed.

`native` and `python` are one decision inside one process (`router_decision`); `gateway` is what the whole hop through
`laya serve` adds to a request, with the load in another process (`router_hop`). No engine is needed for any of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from laya.bench.hardware import hardware
from laya.bench.router_decision import measure_native, measure_python
from laya.bench.router_hop import MOST_CONNECTIONS, MOST_ENGINES, MOST_REQUESTS, measure_gateway
from laya.bench.router_load import RouterLoad
from laya.bench.router_report import print_report
from laya.routing import NATIVE, WHY_NOT_NATIVE
from laya.routing.table import COMPILER

Layer = Literal["native", "python", "gateway", "all"]

LAYERS: dict[str, Callable[[RouterLoad], dict[str, Any]]] = {
    "native": measure_native,
    "python": measure_python,
    "gateway": measure_gateway,
}


def measure(load: RouterLoad, layer: Layer = "all") -> dict[str, Any]:
    """{"layers": {...}, "load": {...}, "hardware": {...}}; without the extension there is no layer native."""
    wanted = [name for name in LAYERS if layer in (name, "all") and (NATIVE or name != "native")]
    return {
        "layers": {name: LAYERS[name](load) for name in wanted},
        "load": dataclasses.asdict(load),
        "hardware": hardware() | {"compiler": COMPILER},
    }


# -------------------------------------------------------------------------------------------------- command line


def _up_to(most: int, least: int = 1) -> Any:
    def parse(text: str) -> int:
        value = int(text.replace("_", "").replace(",", ""))
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be {least} to {most}, not {text}")
        return value

    parse.__name__ = "number"
    return parse


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The tool's options. Exits with 2 and a sentence on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="benchmark_router.py",
        description="What the request router costs: one decision, natively and from Python, and the hop through the "
        f"gateway (of which there are {MOST_REQUESTS:,} requests, {MOST_CONNECTIONS} connections and {MOST_ENGINES} "
        "models at most).",
    )
    parser.add_argument("--requests", type=_up_to(50_000_000), default=10_000, metavar="N")
    parser.add_argument("--threads", type=_up_to(1024), default=8, metavar="N", help="or connections")
    parser.add_argument("--models", type=_up_to(1_000_000), default=10, metavar="N")
    parser.add_argument(
        "--endpoints", type=_up_to(65_536), metavar="N", help="default: 3 for each model, 10000 at most"
    )
    parser.add_argument("--sessions", type=_up_to(10_000_000, least=0), default=1000, metavar="N", help="live sessions")
    parser.add_argument(
        "--prompt-bytes", type=_up_to(1 << 20, least=0), default=0, metavar="N", help="of a prompt; layer python only"
    )
    parser.add_argument("--layer", choices=[*LAYERS, "all"], default="all")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of the table")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when an answer was wrong, or when the native layer was asked for and there is none."""
    args = parse_args(argv)
    load = RouterLoad(
        requests=args.requests,
        threads=args.threads,
        models=args.models,
        endpoints=args.endpoints or min(3 * args.models, 10_000),
        sessions=args.sessions,
        prompt_bytes=args.prompt_bytes,
    )
    if not NATIVE:
        print(
            f"The native core is not here ({WHY_NOT_NATIVE}): the plain-Python twin is measured, under 'python'.\n"
            "With a C++20 compiler, `pip install .` builds it.",
            file=sys.stderr,
        )
    report = measure(load, args.layer)
    if args.json:
        print(json.dumps(report))
    elif report["layers"]:
        print_report(report)
    is_right = all(layer["wrong"] == 0 for layer in report["layers"].values())
    return 0 if report["layers"] and is_right else 1
