"""The request router: which engine serves a request. Pure decisions: no I/O, no waiting, no engine.

(The expert router, which picks experts inside a Mixture-of-Experts model, is another thing.)
"""

from laya.routing.explain import Candidate, Explanation
from laya.routing.feature_twin import MOST_PREFIX_BYTES
from laya.routing.router import RequestRouter
from laya.routing.table import NATIVE, NO_ENDPOINT, UNKNOWN_MODEL, WHY_NOT_NATIVE, RouteTable, prefix_blocks

__all__ = [
    "MOST_PREFIX_BYTES",
    "NATIVE",
    "NO_ENDPOINT",
    "UNKNOWN_MODEL",
    "WHY_NOT_NATIVE",
    "Candidate",
    "Explanation",
    "RequestRouter",
    "RouteTable",
    "prefix_blocks",
]
