"""Owns: one API key as it is used: which models it may use, what it runs now and used lately.

A request counts against its key from its head to its outcome. Knows neither where keys are kept nor how they are
recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from laya.errors import Forbidden, ForbiddenModel, InvalidRequest, LayaError
from laya.gateway.metering import Metered
from laya.types import KeyGrant, KeyRole

if TYPE_CHECKING:
    from laya.gateway.body import ParsedBody
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.exchange import Exchange

USERS: frozenset[KeyRole] = frozenset({"user", "peer", "admin"})  # roles that inference is for


class Key(Metered):
    """A key of this server. `is_bound`: it may not do everything with inference, so each request of it is looked at."""

    __slots__ = ("grant", "is_bound", "models", "name", "role")

    def __init__(self, grant: KeyGrant) -> None:
        super().__init__()
        self.apply(grant)

    def apply(self, grant: KeyGrant) -> None:
        """What it may from now on; what it runs and has used stays."""
        self.grant = grant
        self.name, self.role = grant.name, grant.role
        self.models = frozenset(grant.models)
        self.limit(f"The key '{grant.name}'", grant)
        self.is_bound = self.is_limited or bool(self.models) or grant.role not in USERS

    def admit(self, exchange: Exchange) -> None:
        """Count the request from now on. Raises Forbidden, RateLimitExceeded."""
        if self.role not in USERS:
            raise Forbidden(f"The key '{self.name}' has the role '{self.role}', which is not for inference.")
        self.begin(exchange)
        exchange.account = self

    def route(
        self,
        exchange: Exchange,
        parsed: ParsedBody,
        route: Callable[[Exchange, ParsedBody], Endpoint],
        id_of: Callable[[str], str | None],
    ) -> Endpoint:
        """What `route` gives, if the key may use it; charged. Tells of no model that the key may not use.

        Raises ForbiddenModel, RateLimitExceeded, and what `route` raises.
        """
        name = exchange.header_model or parsed.model
        if name is None and self.models:
            raise InvalidRequest(
                f"'model' is missing. This key may use: {', '.join(sorted(self.models))}.", param="model"
            )
        try:
            endpoint = exchange.endpoint = route(exchange, parsed)
        except LayaError:
            found = exchange.endpoint
            if name is None or self.may_use(name, found.model_id if found is not None else id_of(name), id_of):
                raise
            raise self.forbidden_model(name) from None
        self.take(exchange, endpoint, name or endpoint.model_id, id_of)
        return endpoint

    def take(self, exchange: Exchange, endpoint: Endpoint, name: str, id_of: Callable[[str], str | None]) -> None:
        """The request is for this endpoint, asked for by this name. Raises ForbiddenModel, RateLimitExceeded."""
        if not self.may_use(name, endpoint.model_id, id_of):
            raise self.forbidden_model(name)
        self.charge(exchange, endpoint)

    # models
    def may_use(self, name: str, model_id: str | None, id_of: Callable[[str], str | None]) -> bool:
        """Whether it may use the model `model_id`, asked for as `name`.

        id_of: the id of the model that a name on the list means. A name that is no model (a pool, `auto`) on the list
        allows whatever the rules make of it.
        """
        if not self.models or (name in self.models and (model_id is None or id_of(name) is None)):
            return True
        return model_id is not None and any(model_id == (id_of(each) or each) for each in self.models)

    def forbidden_model(self, name: str) -> ForbiddenModel:
        return ForbiddenModel(self.name, name, sorted(self.models))
