"""routing.rules: which model a request goes to, what a config may say, and pools in the route table."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laya.config import load_config
from laya.config.routing import RouteRule, RoutingConfig
from laya.errors import ConfigError, InvalidRequest
from laya.routing import RequestRouter
from laya.routing.rules import Decision, RequestFacts, Rules
from laya.types import EndpointKind

CONFIG = """
server:
  api_keys:
    - {name: laptop, sha256: %s}
models: {qwen3-8b: {}, qwen3-14b: {}, smollm2-135m: {aliases: [small]}}
routing:
  pools: {big: [qwen3-8b, qwen3-14b]}
  rules:
    - name: research
      model: [auto, "gpt-4*"]
      headers: {X-Team: "re*"}
      min_prompt_tokens: 8000
      to: big
      fallbacks: [small]
    - {name: laptop, model: auto, key: laptop, kind: chat, max_prompt_tokens: 100, to: small}
    - {model: auto, priority: [bulk, default], split: {qwen3-8b: 90, qwen3-14b: 10}, fallbacks: [qwen3-8b]}
    - {name: vectors, kind: [embedding], model: "text-*", to: smollm2-135m}
""" % ("a" * 64)  # fmt: skip


def rules_of(tmp_path: Path, text: str = CONFIG) -> Rules:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return Rules(load_config(path, {}).routing)


def decide(rules: Rules, model: str, **facts: Any) -> Decision:
    return rules.decide(RequestFacts(model=model, **facts))


def test_first_rule_that_a_request_meets_decides(tmp_path: Path) -> None:
    rules = rules_of(tmp_path)
    research = {"x-team": "research"}
    assert rules.header_names == {"x-team"}
    assert decide(rules, "gpt-4o", headers=research, prompt_tokens=9000) == Decision(("big", "small"), "research")
    assert decide(rules, "gpt-4o", headers=research, prompt_tokens=7999) == Decision(("gpt-4o",))
    assert decide(rules, "gpt-4o", prompt_tokens=9000) == Decision(("gpt-4o",))
    assert decide(rules, "auto", key="laptop", prompt_tokens=100) == Decision(("small",), "laptop")
    assert decide(rules, "auto", key="laptop", prompt_tokens=101).rule == "rule 3"
    assert decide(rules, "text-embedding-3", kind=EndpointKind.EMBEDDING) == Decision(("smollm2-135m",), "vectors")
    assert decide(rules, "text-embedding-3") == Decision(("text-embedding-3",))
    assert decide(rules, "x" * 10_000) == Decision(("x" * 10_000,))


def test_auto_without_a_rule_for_it_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="none of them takes this request"):
        decide(rules_of(tmp_path), "auto", priority="interactive")
    no_rules = rules_of(tmp_path, "version: 1")
    assert not no_rules
    assert decide(no_rules, "auto") == Decision(("auto",)), "a name like any other"


def test_split_is_by_percentage_and_a_session_keeps_its_own(tmp_path: Path) -> None:
    rules = rules_of(tmp_path)
    shares = Counter(decide(rules, "auto", identity=f"request {i}").models for i in range(4000))
    assert set(shares) == {("qwen3-8b",), ("qwen3-14b", "qwen3-8b")}
    assert 300 < shares["qwen3-14b", "qwen3-8b"] < 500
    asked = {decide(rules, "auto", session="s", identity=f"request {i}") for i in range(50)}
    assert len(asked) == 1


def test_verdicts_say_what_each_rule_misses(tmp_path: Path) -> None:
    verdicts = rules_of(tmp_path).verdicts(RequestFacts(model="auto", prompt_tokens=9000))
    assert [(verdict.rule, verdict.misses) for verdict in verdicts] == [
        ("research", "header X-Team: re*"),
        ("laptop", "key laptop"),
        ("rule 3", ""),
    ]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ("rules: [{model: a}]", r"routing.rules.0: a rule needs `to` or `split`; neither is here"),
        ("rules: [{to: a, split: {b: 100}}]", "both are here"),
        ("rules: [{split: {a: 60, b: 30}}]", "the percentages are 90 together, not 100"),
        ("rules: [{model: x, to: auto}]", "auto is what the rules decide"),
        ("rules: [{to: a}, {model: x, to: b}]", "rules.1: it is never reached, since routing.rules.0"),
        ("rules: [{name: n, model: x, to: a}, {name: n, to: b}]", "two rules are named n"),
        ("rules: [{model: '*', to: b}, {name: n, model: auto, to: a}]", "n is never reached, since routing.rules.0"),
        ("rules: [{headers: {X-T: 'a*'}, kind: [chat, rerank], to: b}, {headers: {x-t: ab}, kind: chat, to: a}]",
         "it is never reached, since routing.rules.0"),
        ("rules: [{model: x, to: a, fallbacks: [b, a]}]", "rules.0.fallbacks: a is what the rule leads to already"),
        ("rules: [{model: x, to: small, fallbacks: [smollm2-135m]}]", "smollm2-135m is what the rule leads to already"),
        ("rules: [{model: x, to: a, fallbacks: [b, b]}]", "rules.0.fallbacks: b is in it twice"),
        ("rules: [{headers: {'x team': a}, to: a}]", "rules.0.headers: no header can be named 'x team'"),
        ("pools: {p: [a, b, a]}", "routing.pools.p: a is in it twice"),
        ("rules: [{split: {a: 150, b: -50}}]", "split: expected models or pools with whole percentages that add"),
        ("rules: [{split: {a: 33.3, b: 66.7}}]", "whole percentages that add up to 100, got"),
        ("rules: [{key: lapto, to: a}]", "no key is named lapto here; did you mean laptop"),
        ("rules: [{min_prompt_tokens: 9, max_prompt_tokens: 8, to: a}]", "no prompt has 9 tokens at least"),
        ("rules: [{headers: {x-team: ''}, to: a}]", "expected a name and a value"),
        ("rules: [{kind: chats, to: a}]", "routing.rules.0.kind: expected chat or completion or decision or embedding"),
        ("rules: [{mdoel: a, to: b}]", "mdoel is not a key here. Did you mean model"),
        ("rules: {to: a}", "routing.rules: expected a list"),
        ("pools: {smollm2-135m: [a]}", "smollm2-135m is the name of a model already"),
        ("pools: {auto: [a]}", "auto is the name of the rules already"),
        ("pools: {p: []}", "a pool needs a model"),
        ("pools: {p: [q], q: [a]}", "q is no model; a pool holds models only"),
    ],
)  # fmt: skip
def test_config_refuses_rules_that_cannot_do_what_they_say(tmp_path: Path, routing: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as fault:
        rules_of(tmp_path, CONFIG.split("routing:")[0] + f"routing:\n  {routing}\n")
    assert "config.yaml:" in fault.value.message


@pytest.mark.parametrize(
    "rules",
    [
        "{model: 'a?', to: b}, {model: 'a*', to: c}",
        "{model: auto, to: b}, {to: c}",
        "{model: [a, b], to: b}, {model: [b, c], to: c}",
        "{headers: {x-t: a}, to: b}, {headers: {x-t: 'a*'}, to: c}",
        "{max_prompt_tokens: 9, to: b}, {min_prompt_tokens: 5, to: c}",
        "{priority: bulk, to: b}, {priority: [bulk, default], to: c}",
    ],
)
def test_rule_that_takes_something_of_its_own_may_follow(tmp_path: Path, rules: str) -> None:
    assert rules_of(tmp_path, f"routing: {{rules: [{rules}]}}")


def test_auto_is_no_models_name_where_there_are_rules(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="auto leaves the choice to"):
        rules_of(tmp_path, "models: {auto: {}}\nrouting: {rules: [{model: x, to: auto-2}]}")


def test_policy_is_a_setting_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("policy: session\nmodels: {a: {policy: weighted}}")
    config = load_config(path, {})
    assert (config.for_model("a").policy, config.for_model("b").policy) == ("weighted", "session")
    path.write_text("policy: fastest")
    with pytest.raises(ConfigError, match="policy: expected auto or hash or"):
        load_config(path, {})


# ---------------------------------------------------------------------------------------------- pools


def test_pool_is_served_by_its_least_loaded_engine(table_type: Any) -> None:
    router = RequestRouter(table_type())
    first, second = router.add_endpoint(), router.add_endpoint()
    router.set_pools({"pool": ["a", "alias", "not here yet"]})
    router.set_models([("a", [first], ()), ("b", [second], ["alias"])])
    assert {router.choose("pool", tokens=10), router.choose("pool", tokens=10)} == {first, second}
    assert router.choose("pool", session="s") == router.choose("pool", session="s")
    assert "pool" in router.known_names() and router.known_models() == ["a", "b"]
    explained = router.explain("pool")
    assert explained is not None and len(explained.candidates) == 2
    router.remove_model("a")
    assert router.choose("pool") == second


@pytest.mark.parametrize("policy", ["auto", "least_tokens", "weighted", "hash", "round_robin"])
def test_pool_chooses_among_preferred_engines_unless_its_policy_says_who(table_type: Any, policy: Any) -> None:
    router = RequestRouter(table_type())
    first, second, third = (router.add_endpoint(name=name) for name in "abc")
    router.set_pools({"pool": ["a", "b", "c"]}, policy)
    router.set_models([("a", [first], ()), ("b", [second], ()), ("c", [third], ())])

    sessions = itertools.count()  # a known one stays where it was

    def chosen() -> set[int]:
        found = [router.choose("pool", session=f"s{next(sessions)}", tokens=10) for _ in range(60)]
        for endpoint in found:
            router.settle(endpoint, 10)
        return set(found)

    everybody = {first, second, third}
    assert chosen() == everybody
    router.prefer({"pool": frozenset({second, 63}), "gone": frozenset({third})})
    assert chosen() == ({second} if policy in ("auto", "least_tokens") else everybody)
    assert router.choose("a") == first, "a model that is named is served by its own"
    router.settle(first, 0)
    router.prefer({})
    assert chosen() == everybody


def test_pool_with_the_name_of_a_model_is_refused(table_type: Any) -> None:
    router = RequestRouter(table_type())
    router.set_model("a", [router.add_endpoint()])
    with pytest.raises(ConfigError, match="the pool 'a' has the name of model 'a'"):
        router.set_pools({"a": ["b"]})
    router.set_pools({"p": ["a"]})
    with pytest.raises(ConfigError, match="the pool 'p' has the name of model 'p'"):
        router.set_model("p", [])
    assert router.known_names() == ["a", "p"]


# ---------------------------------------------------------------------------------------------- compiled as written

NAMES = ["auto", "a", "ab", "b-1", "b-2"]
PATTERNS = ["auto", "a", "a*", "b-?", "*"]
rule_structs = st.builds(
    RouteRule,
    model=st.lists(st.sampled_from(PATTERNS), max_size=2),
    headers=st.dictionaries(st.sampled_from(["X-A", "x-b"]), st.sampled_from(["1", "*", "2?"]), max_size=2),
    key=st.lists(st.sampled_from(["k1", "k2"]), max_size=1),
    kind=st.lists(st.sampled_from(["chat", "rerank"]), max_size=2),
    min_prompt_tokens=st.none() | st.integers(0, 20),
    max_prompt_tokens=st.none() | st.integers(0, 20),
    priority=st.lists(st.sampled_from(["bulk", "default"]), max_size=1),
    to=st.sampled_from(["m1", "m2"]),
    fallbacks=st.lists(st.sampled_from(["m1", "m3"]), max_size=2),
)
request_facts = st.builds(
    RequestFacts,
    model=st.sampled_from(NAMES),
    kind=st.sampled_from(list(EndpointKind)),
    headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), st.sampled_from(["", "1", "21"]), max_size=2),
    key=st.sampled_from([None, "k1", "k2"]),
    prompt_tokens=st.integers(0, 22),
    priority=st.sampled_from(["system", "bulk", "default"]),
)


def meets(rule: RouteRule, facts: RequestFacts) -> bool:
    """What a rule says, read word by word."""
    return (
        (not rule.model or any(fnmatchcase(facts.model, pattern) for pattern in rule.model))
        and all(fnmatchcase(facts.headers.get(name.lower(), "\0"), value) for name, value in rule.headers.items()
                if name.lower() in facts.headers)
        and all(name.lower() in facts.headers for name in rule.headers)
        and (not rule.key or facts.key in rule.key)
        and (not rule.kind or facts.kind.name.lower() in rule.kind)
        and (not rule.priority or facts.priority in rule.priority)
        and (rule.min_prompt_tokens is None or facts.prompt_tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or facts.prompt_tokens <= rule.max_prompt_tokens)
    )  # fmt: skip


@given(st.lists(rule_structs, max_size=5), st.lists(request_facts, max_size=8))
def test_compiled_rules_decide_as_they_are_written(written: list[RouteRule], asked: list[RequestFacts]) -> None:
    rules = Rules(RoutingConfig(rules=written))
    for facts in asked:
        rule = next((rule for rule in written if meets(rule, facts)), None)
        if rule is None:
            with pytest.raises(InvalidRequest) if facts.model == "auto" and written else nullcontext():
                assert rules.decide(facts) == Decision((facts.model,))
        else:
            assert rules.decide(facts).models == tuple(dict.fromkeys([rule.to, *rule.fallbacks]))
            assert rules.verdicts(facts)[-1].misses == ""
