"""The request router: which engine serves a request. Pure decisions: no I/O, no waiting, no engine.

(The expert router, which picks experts inside a Mixture-of-Experts model, is another thing.)
"""

from laya.routing.router import RequestRouter
from laya.routing.table import NATIVE, NO_ENDPOINT, UNKNOWN_MODEL, WHY_NOT_NATIVE, RouteTable

__all__ = ["NATIVE", "NO_ENDPOINT", "UNKNOWN_MODEL", "WHY_NOT_NATIVE", "RequestRouter", "RouteTable"]
