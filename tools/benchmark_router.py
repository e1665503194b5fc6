"""What one routing decision costs: `python tools/benchmark_router.py --requests 10000 --threads 8`."""

import importlib.util
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("laya") is None:
        sys.exit("Laya is not installed in this Python. Install it first: pip install -r requirements.txt")
    from laya.bench.router import main

    sys.exit(main())
