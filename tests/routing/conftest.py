"""Both route tables: what is said of one must hold for the other."""

from __future__ import annotations

from typing import Any

import pytest

from laya.routing import NATIVE
from laya.routing.table import RouteTable
from laya.routing.table_twin import RouteTable as RouteTableTwin

TABLES = [pytest.param(RouteTableTwin, id="twin")]
if NATIVE:
    TABLES.append(pytest.param(RouteTable, id="native"))


@pytest.fixture(params=TABLES)
def table_type(request: pytest.FixtureRequest) -> Any:
    return request.param
