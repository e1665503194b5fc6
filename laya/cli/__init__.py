"""argv in, exit code out: one module per verb or small group of verbs, put together in `main.py`."""
