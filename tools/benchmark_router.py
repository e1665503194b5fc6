"""What one routing decision costs: `python tools/benchmark_router.py --requests 10000 --threads 8`."""

import sys

try:
    from laya.bench.router import main
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install Laya first: pip install -r requirements.txt")

if __name__ == "__main__":
    sys.exit(main())
