"""HTTP in, HTTP out: one port for the API, admin, metrics and page.

`dispatch.py` holds the six steps of a request; `server.py` starts everything. The rooms below (routing, memory,
engines, store, models) meet here and nowhere else.
"""
