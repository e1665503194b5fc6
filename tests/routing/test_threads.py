"""Many threads choose and settle while the models change and endpoints die: no wrong answer, no lost count."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from laya.routing import NO_ENDPOINT, UNKNOWN_MODEL, RequestRouter

N_THREADS = 8
N_REQUESTS = 2000
N_CHANGES = 300


def serve(router: RequestRouter, thread: int, answers: dict[str, range]) -> dict[str, int]:
    """Ask and settle; returns how many requests ended how."""
    outcomes = {"served": 0, "no_endpoint": 0, "unknown": 0, "wrong": 0}
    for i in range(N_REQUESTS):
        model = f"model-{(i + thread) % 5}"
        endpoint = router.choose(model, session=f"s{i % 40}", tokens=64, n_seqs=2)
        if endpoint == NO_ENDPOINT:
            outcomes["no_endpoint"] += 1
        elif endpoint == UNKNOWN_MODEL:
            outcomes["unknown"] += 1
        else:
            outcomes["served" if endpoint in answers[model] and endpoint % 3 != 2 else "wrong"] += 1
            router.settle(endpoint, 64, 2)
    return outcomes


def test_router_is_right_under_threads_while_models_change(table_type: Any) -> None:
    router = RequestRouter(table_type(max_endpoints=16))
    answers = {f"model-{i}": range(3 * i, 3 * i + 3) for i in range(5)}
    for _ in range(15):
        router.add_endpoint()
    for model in list(answers)[:4]:  # model-4 comes and goes
        router.set_model(model, answers[model])
    for endpoint in range(2, 15, 3):
        router.set_eligible(endpoint, False)

    def change() -> None:
        for _ in range(N_CHANGES):
            router.set_model("model-4", answers["model-4"])
            router.set_eligible(0, False)
            router.remove_model("model-4")
            router.set_eligible(0, True)

    changer = threading.Thread(target=change)
    changer.start()
    with ThreadPoolExecutor(N_THREADS) as pool:
        outcomes = list(pool.map(lambda thread: serve(router, thread, answers), range(N_THREADS)))
    changer.join()
    total = {outcome: sum(of[outcome] for of in outcomes) for outcome in outcomes[0]}
    assert sum(total.values()) == N_THREADS * N_REQUESTS
    assert total["wrong"] == total["no_endpoint"] == 0, "each model keeps an eligible endpoint throughout"
    assert total["served"] >= N_THREADS * N_REQUESTS * 4 // 5, "only model-4 was ever unknown"
    assert [router.load(endpoint) for endpoint in range(15)] == [(0, 0)] * 15
