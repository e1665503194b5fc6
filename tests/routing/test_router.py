"""RequestRouter: models, aliases, endpoint indexes and the life of a request, over both tables."""

from __future__ import annotations

from typing import Any

import pytest

from laya.errors import ConfigError
from laya.routing import NO_ENDPOINT, UNKNOWN_MODEL, RequestRouter
from laya.types import EndpointKind

from .names import colliding_name


@pytest.fixture
def router(table_type: Any) -> RequestRouter:
    return RequestRouter(table_type(max_endpoints=8))


def test_router_serves_a_model_by_id_and_alias(router: RequestRouter) -> None:
    endpoint = router.add_endpoint()
    router.set_model("smollm2-135m", [endpoint], aliases=["smollm2", "smollm2-135m"])
    assert router.choose("smollm2-135m", session="s", kind=EndpointKind.COMPLETION, streaming=True) == endpoint
    assert router.choose("smollm2") == endpoint
    assert router.choose("smollm3") == UNKNOWN_MODEL
    assert router.known_models() == ["smollm2-135m"]
    assert router.known_names() == ["smollm2-135m", "smollm2"]
    assert router.resolve("smollm2") == "smollm2-135m"
    assert router.resolve("smollm3") is None


def test_router_counts_until_settled(router: RequestRouter) -> None:
    endpoint = router.add_endpoint()
    router.set_model("m", [endpoint])
    router.choose("m", tokens=300, n_seqs=3)
    router.choose("m", tokens=50)
    assert router.load(endpoint) == (4, 350)
    router.settle(endpoint, 300, 3)
    router.settle(endpoint, 50)
    assert router.load(endpoint) == (0, 0)


def test_router_spreads_by_capacity_and_keeps_sessions(router: RequestRouter) -> None:
    first, second = router.add_endpoint(), router.add_endpoint()
    router.set_model("m", [first, second])
    for endpoint in (first, second):
        router.set_capacity(endpoint, max_num_seqs=2, kv_pool_tokens=16384)
    assert [router.choose("m", session="s", tokens=4096) for _ in range(2)] == [first, first]
    assert router.choose("m", session="s", tokens=4096) == second, "both sequences of its endpoint are taken"


def test_router_without_an_eligible_endpoint_says_so(router: RequestRouter) -> None:
    endpoint = router.add_endpoint(eligible=False)
    router.set_model("m", [endpoint])
    assert router.choose("m") == NO_ENDPOINT
    router.set_eligible(endpoint, True)
    assert router.choose("m") == endpoint
    router.set_model("m", [])
    assert router.choose("m") == NO_ENDPOINT


def test_router_forgets_a_removed_model(router: RequestRouter) -> None:
    endpoint = router.add_endpoint()
    router.set_model("m", [endpoint], ["n"])
    router.remove_model("m")
    router.remove_model("m")
    assert router.choose("m") == router.choose("n") == UNKNOWN_MODEL
    router.set_model("n", [endpoint])
    assert router.choose("n") == endpoint


def test_router_recycles_an_index_only_after_its_last_request(router: RequestRouter) -> None:
    first = router.add_endpoint()
    router.set_model("m", [first])
    router.choose("m", tokens=10)
    router.remove_endpoint(first)
    assert router.choose("m") == NO_ENDPOINT, "the endpoint has left its model"
    second = router.add_endpoint()
    assert second != first, "a late settle must not reach a stranger's counters"
    router.settle(first, 10)
    router.remove_endpoint(second)
    assert router.add_endpoint() == first
    assert router.add_endpoint() == second


def test_router_gives_a_recycled_index_no_memory(router: RequestRouter) -> None:
    first, second = router.add_endpoint(), router.add_endpoint()
    router.set_model("m", [first, second])
    router.set_capacity(first, 1, 100)
    router.choose("m", session="s")
    router.settle(first, 0)
    router.remove_endpoint(first)
    assert router.add_endpoint() == first
    router.set_model("other", [first])
    assert router.choose("m", session="s") == second
    assert [router.choose("other", tokens=200) for _ in range(2)] == [first, first]


def test_router_has_an_end_of_indexes(router: RequestRouter) -> None:
    for _ in range(8):
        router.add_endpoint()
    with pytest.raises(ConfigError, match="8 endpoints at most"):
        router.add_endpoint()


def test_router_refuses_an_index_it_did_not_hand_out(router: RequestRouter) -> None:
    with pytest.raises(ValueError, match="endpoint 3 is not in use"):
        router.set_model("m", [3])
    with pytest.raises(ValueError, match="endpoint 3 is not in use"):
        router.remove_endpoint(3)
    assert router.known_models() == []


def test_router_refuses_a_name_of_another_model(router: RequestRouter) -> None:
    endpoint = router.add_endpoint()
    router.set_model("a", [endpoint], ["shared"])
    with pytest.raises(ConfigError, match="'shared' of model 'b' already belongs to model 'a'"):
        router.set_model("b", [endpoint], ["shared"])
    assert router.known_names() == ["a", "shared"]
    router.set_model("a", [endpoint])
    router.set_model("b", [endpoint], ["shared"])
    assert router.resolve("shared") == "b"


def test_router_refuses_two_names_with_one_hash(router: RequestRouter) -> None:
    name = "sixteen bytes of"
    endpoint = router.add_endpoint()
    router.set_model(name, [endpoint])
    with pytest.raises(ConfigError, match="same 64-bit hash"):
        router.set_model("b", [endpoint], [colliding_name(name.encode())])  # type: ignore[list-item]
    assert router.known_models() == [name]
