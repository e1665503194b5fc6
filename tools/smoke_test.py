"""Every part of a running Laya once: `LAYA_URL=http://127.0.0.1:8000 python tools/smoke_test.py [MODEL] [--json]`."""

import importlib.util
import sys

if __name__ == "__main__":
    if importlib.util.find_spec("laya") is None:
        sys.exit("Laya is not installed in this Python. Install it first: pip install -r requirements.txt")
    from laya.cli.main import main

    main(["smoke", *sys.argv[1:]])
