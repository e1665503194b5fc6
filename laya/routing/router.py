"""Owns: the models, aliases and endpoint indexes that the gateway routes by, over one route table.

Knows no engine and no HTTP: an endpoint is a number that the gateway maps to an engine. An endpoint exists as soon as
its model is known, also before its engine runs; eligible means "may be chosen", and only the gateway says so.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from laya.errors import ConfigError
from laya.routing.choice_twin import POLICIES, READ_PROMPT
from laya.routing.explain import Explanation, explain
from laya.routing.table import FLAG_STREAMING, RouteTable, hash_name
from laya.routing.table_twin import RouteTable as RouteTableTwin
from laya.types import EndpointKind, RoutePolicy

TAKES_ALL: frozenset[RoutePolicy] = frozenset({"weighted", "hash", "round_robin"})


class _Model(NamedTuple):
    names: tuple[str, ...]  # the model's id, then its aliases
    endpoints: tuple[int, ...]
    policy: RoutePolicy = "auto"


class RequestRouter:
    """Model name, session and load -> endpoint.

    `choose` and `settle` may be called from any thread and never wait for a change of the models; every change
    publishes a whole new table.
    """

    def __init__(self, table: RouteTable | RouteTableTwin | None = None) -> None:
        self.table = self._table = table if table is not None else RouteTable()
        self._route = self._table.route
        self.route = self._table.route  # what `choose` and `settle` come to, for who knows the fields
        self.settle_route = self._table.settle
        self.names_by_prompt: frozenset[str] = frozenset()  # names whose endpoint depends on a prompt's blocks
        self._models: dict[str, _Model] = {}
        self._pools: Mapping[str, Sequence[str]] = {}
        self._pool_policy: RoutePolicy = "auto"
        self._spares: Mapping[str, Sequence[str]] = {}
        self.preferred: Mapping[str, frozenset[int]] = {}  # endpoints, by pool
        self._routes: dict[str, _Model] = {}  # models, and pools as if they were models
        self._id_of_name: dict[str, str] = {}
        self._in_use: dict[int, str] = {}  # index -> name
        self._removed: set[int] = set()  # indexes that wait for their last request to settle
        self._changing = threading.Lock()

    # ---------------------------------------------------------------------------------------- one request

    def choose(
        self,
        model: str,
        *,
        session: str | None = None,
        kind: EndpointKind = EndpointKind.CHAT,
        streaming: bool = False,
        prefix_hash: int = 0,
        tokens: int = 0,
        n_seqs: int = 1,
        prefix_blocks: bytes = b"",
    ) -> int:
        """The endpoint (0 or above) that serves the request, or UNKNOWN_MODEL or NO_ENDPOINT.

        tokens: KV tokens that all n_seqs sequences of the request may take together, 0 to 2**32 - 1. The endpoint
        carries both until `settle` is called with the same numbers. prefix_blocks: what `prefix_blocks(prompt)` made,
        so that a prompt goes where its beginning is cached; without it prefix_hash, 0 = none, stands for the whole
        prompt. Raises ValueError when a number is out of range.
        """
        flags = FLAG_STREAMING if streaming else 0
        return self._route(model, session, kind, flags, prefix_hash, tokens, n_seqs, prefix_blocks)

    def explain(
        self, model: str, *, session: str | None = None, tokens: int = 0, n_seqs: int = 1, prefix_blocks: bytes = b""
    ) -> Explanation | None:
        """What `choose` would answer now, among which candidates and why; None for an unknown model."""
        model_id = self._id_of_name.get(model)
        if model_id is None:
            return None
        known = self._routes[model_id]
        return explain(
            self._table,
            {endpoint: self._in_use[endpoint] for endpoint in known.endpoints},
            known.policy,
            model=model_id,
            session=session,
            prefix_blocks=prefix_blocks,
            tokens=tokens,
            n_seqs=n_seqs,
        )

    def settle(self, endpoint: int, tokens: int, n_seqs: int = 1) -> None:
        """Take back what `choose` added to the endpoint. Raises IndexError for an endpoint that cannot exist."""
        self._table.settle(endpoint, n_seqs, tokens)

    def load(self, endpoint: int) -> tuple[int, int]:
        """(sequences in flight, KV tokens reserved) of an endpoint."""
        return self._table.load(endpoint)

    # ---------------------------------------------------------------------------------------- endpoints

    def add_endpoint(self, *, eligible: bool = True, name: str = "", weight: int = 1) -> int:
        """A free endpoint index, with no load, no limits and no history. Raises ConfigError when all are taken.

        name: of the engine, such as `smollm2#1`; sessions that hash to it do so again after a restart. weight: its
        share under the policy `weighted`, 0 to 65535.
        """
        with self._changing:
            settled = sorted(index for index in self._removed if self._table.load(index) == (0, 0))
            if settled:
                index = settled[0]
                self._removed.remove(index)
            else:
                index = len(self._in_use) + len(self._removed)
            if index >= self._table.max_endpoints:
                raise ConfigError(
                    f"there can be {self._table.max_endpoints} endpoints at most; start fewer models or replicas"
                )
            self._in_use[index] = name or f"endpoint {index}"
            self._table.reset(index)
            self._table.set_weight(index, weight)
            if name:
                self._table.set_seed(index, hash_name(name))
            self._table.set_eligible(index, eligible)
            return index

    def remove_endpoint(self, endpoint: int) -> None:
        """Take the endpoint out of every model. Its index is handed out again once its requests have settled."""
        with self._changing:
            self._require_in_use([endpoint])
            self._table.set_eligible(endpoint, False)
            kept = {
                model_id: model._replace(endpoints=tuple(index for index in model.endpoints if index != endpoint))
                for model_id, model in self._models.items()
            }
            self._publish(kept)
            del self._in_use[endpoint]
            self._removed.add(endpoint)

    def set_eligible(self, endpoint: int, eligible: bool) -> None:
        """Whether the endpoint may be chosen. Requests that it already carries are not touched."""
        self._require_in_use([endpoint])
        self._table.set_eligible(endpoint, eligible)

    def set_capacity(self, endpoint: int, max_num_seqs: int, kv_pool_tokens: int) -> None:
        """Sequences and KV tokens that the endpoint holds at once; 0 = no limit. An endpoint without room for a
        request is chosen only when none of the model's has room."""
        self._require_in_use([endpoint])
        self._table.set_capacity(endpoint, max_num_seqs, kv_pool_tokens)

    def set_weight(self, endpoint: int, weight: int) -> None:
        """Its share under the policy `weighted`, 0 to 65535, from the next choice on."""
        self._require_in_use([endpoint])
        self._table.set_weight(endpoint, weight)

    # ---------------------------------------------------------------------------------------- models

    def set_model(
        self, model_id: str, endpoints: Sequence[int], aliases: Sequence[str] = (), policy: RoutePolicy | None = None
    ) -> None:
        """Make a model known, or replace what was known of it; its policy stays where none is said, `auto` at first.

        Raises ConfigError when one of its names belongs to another model, ValueError for an endpoint not in use.
        """
        self.set_models([(model_id, endpoints, aliases)], {model_id: policy} if policy else {})

    def set_models(
        self,
        models: Iterable[tuple[str, Sequence[int], Sequence[str]]],
        policies: Mapping[str, RoutePolicy] | None = None,
    ) -> None:
        """`set_model` for many (id, endpoints, aliases) at once: all of them, or none when one is wrong.

        policies: by model id, for those that get a new one.
        """
        with self._changing:
            changed = dict(self._models)
            for model_id, endpoints, aliases in models:
                self._require_in_use(endpoints)
                was = self._models.get(model_id)
                policy = (policies or {}).get(model_id) or (was.policy if was else "auto")
                changed[model_id] = _Model(tuple(dict.fromkeys([model_id, *aliases])), tuple(endpoints), policy)
            self._publish(changed)

    def set_pools(self, pools: Mapping[str, Sequence[str]], policy: RoutePolicy = "auto") -> None:
        """Make names known that stand for several models: their endpoints together, chosen from like those of one.

        A member that is not known, yet or any more, has none. Raises ConfigError for a name that a model has.
        """
        with self._changing:
            was = self._pools, self._pool_policy
            self._pools, self._pool_policy = dict(pools), policy
            try:
                self._publish(self._models)
            except ConfigError:
                self._pools, self._pool_policy = was
                raise

    def set_spares(self, spares: Mapping[str, Sequence[str]]) -> None:
        """Pools whose names give way: a model or a pool of `set_pools` that is called so has the name, while there is
        one. Whom `prefer` names of them is chosen under every policy."""
        with self._changing:
            self._spares = dict(spares)
            self._publish(self._models)

    def prefer(self, preferred: Mapping[str, frozenset[int]]) -> None:
        """Each of these pools chooses among its endpoints here alone, where it has any of them; a policy that says
        itself who is chosen, whoever that is (`TAKES_ALL`), among all."""
        with self._changing:
            if preferred != self.preferred:
                self.preferred = preferred
                if self._spares or (self._pools and self._pool_policy not in TAKES_ALL):
                    self._publish(self._models)

    def remove_model(self, model_id: str) -> None:
        """Forget a model and its aliases; its endpoints stay. Nothing happens when it is not known."""
        with self._changing:
            if model_id in self._models:
                self._publish({other: model for other, model in self._models.items() if other != model_id})

    def known_models(self) -> list[str]:
        """Ids of the known models, without aliases, in the order in which they came."""
        return list(self._models)

    def known_names(self) -> list[str]:
        """Every name that a request may use: ids, aliases and pools."""
        return list(self._id_of_name)

    def resolve(self, name: str) -> str | None:
        """The id of the model that a name or alias stands for, a pool's own name, or None."""
        return self._id_of_name.get(name)

    def _require_in_use(self, endpoints: Iterable[int]) -> None:
        for endpoint in endpoints:
            if endpoint not in self._in_use:
                raise ValueError(f"endpoint {endpoint} is not in use; add_endpoint() hands out indexes")

    def _publish(self, models: dict[str, _Model]) -> None:
        id_of_name = _ids_by_name(models)
        pools = {}
        named = {name: members for name, members in self._spares.items() if name not in id_of_name}
        for pool, members in (named | dict(self._pools)).items():
            ids = dict.fromkeys(id_of_name[member] for member in members if member in id_of_name)
            endpoints = dict.fromkeys(endpoint for model_id in ids for endpoint in models[model_id].endpoints)
            takes_all = self._pool_policy in TAKES_ALL and pool in self._pools
            preferred = () if takes_all else self.preferred.get(pool, ())
            first = tuple(each for each in endpoints if each in preferred)
            pools[pool] = _Model((pool,), first or tuple(endpoints), self._pool_policy)
        routes = models | pools
        for pool in pools.keys() & id_of_name.keys():
            raise ConfigError(f"the pool '{pool}' has the name of model '{id_of_name[pool]}'; rename one")
        try:
            self._table.publish(
                (route.names, route.endpoints, POLICIES.index(route.policy)) for route in routes.values()
            )
        except ValueError as error:  # two names with one hash: the only fault left that a user can cause
            raise ConfigError(str(error)) from error
        self._models, self._routes = models, routes
        by_prompt = (route for route in routes.values() if POLICIES.index(route.policy) in READ_PROMPT)
        self.names_by_prompt = frozenset(
            name for route in by_prompt if len(set(route.endpoints)) > 1 for name in route.names
        )
        self._id_of_name = id_of_name | {pool: pool for pool in pools}


def _ids_by_name(models: dict[str, _Model]) -> dict[str, str]:
    id_of_name: dict[str, str] = {}
    for model_id, model in models.items():
        for name in model.names:
            other = id_of_name.setdefault(name, model_id)
            if other != model_id:
                raise ConfigError(
                    f"the name '{name}' of model '{model_id}' already belongs to model '{other}'; rename one"
                )
    return id_of_name
