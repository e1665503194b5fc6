"""What `explain` says is what `choose` then does, whatever the state."""

from __future__ import annotations

import random
from typing import Any

from laya.routing import NO_ENDPOINT, RequestRouter, prefix_blocks
from laya.routing.choice_twin import POLICIES


def new_router(table_type: Any, n_endpoints: int) -> RequestRouter:
    router = RequestRouter(table_type(window_tokens=500))
    for i in range(n_endpoints):
        router.add_endpoint(name=f"m#{i}")
    router.set_model("m", range(n_endpoints), ["alias"])
    return router


def happen(router: RequestRouter, dice: random.Random, endpoint: int) -> None:
    table = router.table
    dice.choice(
        [
            lambda: router.settle(endpoint, dice.randrange(900), 3),
            lambda: router.set_eligible(endpoint, dice.random() < 0.8),
            lambda: router.set_capacity(endpoint, dice.randrange(5), dice.choice([0, 2000])),
            lambda: table.set_weight(endpoint, dice.randrange(4)),
            lambda: table.failed(endpoint, 2),
            lambda: table.served(endpoint),
            lambda: table.half_open(endpoint),
        ]
    )()


def test_explanation_is_the_next_choice(table_type: Any) -> None:
    dice = random.Random(4)
    for policy in POLICIES:
        for n_endpoints in (1, 3, 12):
            router = new_router(table_type, n_endpoints)
            router.set_model("m", range(n_endpoints), ["alias"], policy)
            for _ in range(150):
                session = dice.choice([None, "", f"s{dice.randrange(9)}"])
                blocks = prefix_blocks(dice.choice(["", "a" * 100, "a" * 2000, "b" * 700]))
                tokens = dice.randrange(400)
                said = router.explain("alias", session=session, tokens=tokens, prefix_blocks=blocks)
                assert said is not None
                chosen = router.choose("m", session=session, tokens=tokens, prefix_blocks=blocks)
                assert said.endpoint == chosen, said
                assert [candidate.endpoint for candidate in said.candidates if candidate.is_chosen] == (
                    [] if chosen == NO_ENDPOINT else [chosen]
                )
                happen(router, dice, dice.randrange(n_endpoints))


def test_explanation_says_why(table_type: Any) -> None:
    router = new_router(table_type, 3)
    assert router.explain("unknown") is None
    home = router.choose("m", session="s", tokens=10)
    said = router.explain("alias", session="s")
    assert said is not None and (said.model, said.policy, said.endpoint) == ("m", "auto", home)
    assert said.why.startswith("its session was here last")
    router.set_eligible(home, False)
    said = router.explain("m", session="s")
    assert said is not None and said.why.endswith("gets it back when it may")
    assert [candidate.why_not for candidate in said.candidates if not candidate.is_eligible] == ["not ready"]
    for endpoint in range(3):
        router.table.failed(endpoint, 1)
    said = router.explain("m")
    assert said is not None and (said.endpoint, said.why) == (NO_ENDPOINT, "none may be chosen")
    assert "its circuit breaker is open" in {candidate.why_not for candidate in said.candidates}
