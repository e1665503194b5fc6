"""The typed contract of the native core; `laya.routing.table_twin` says what each part means and answers the same."""

from collections.abc import Iterable, Sequence
from typing import TypedDict

UNKNOWN_MODEL: int
NO_ENDPOINT: int
BAD_FEATURE: int
FEATURE_VERSION: int
FLAG_STREAMING: int
COMPILER: str

class BenchResult(TypedDict):
    elapsed_s: float
    mean_ns: float
    p50_ns: float
    p99_ns: float
    p999_ns: float
    max_ns: float
    timer_ns: float
    preempted_share: float
    n_wrong: int
    n_moved: int

def hash_name(name: str | bytes) -> int: ...
def pack_feature(
    *, kind: int, flags: int, tokens: int, model_hash: int, session_hash: int = 0, prefix_hash: int = 0
) -> bytes: ...
def unpack_feature(feature: bytes) -> tuple[int, int, int, int, int, int, int]: ...
def bench_choose(
    table: RouteTable, features: bytes, first: Sequence[int], count: Sequence[int], n_threads: int, n_requests: int
) -> BenchResult: ...

class RouteTable:
    def __init__(
        self, *, max_endpoints: int = 1024, session_bytes: int = 1048576, window_tokens: int = 8192
    ) -> None: ...
    @property
    def max_endpoints(self) -> int: ...
    @property
    def session_capacity(self) -> int: ...
    def publish(self, models: Iterable[tuple[Iterable[str | bytes], Iterable[int]]]) -> None: ...
    def route(
        self,
        model: str | bytes,
        session: str | bytes | None,
        kind: int,
        flags: int,
        prefix_hash: int,
        tokens: int,
        n_seqs: int,
    ) -> int: ...
    def choose(self, feature: bytes, n_seqs: int = 1) -> int: ...
    def settle(self, endpoint: int, n_seqs: int, tokens: int) -> None: ...
    def set_eligible(self, endpoint: int, eligible: bool) -> None: ...
    def set_capacity(self, endpoint: int, max_num_seqs: int, kv_pool_tokens: int) -> None: ...
    def load(self, endpoint: int) -> tuple[int, int]: ...
    def is_eligible(self, endpoint: int) -> bool: ...
