"""Owns: types of values that keys of several sections have: counts, amounts and times, with units and bounds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Bytes = Annotated[int, Meta(ge=0, extra={"unit": "bytes"}, extra_json_schema={"x-unit": "bytes"})]
Count = Annotated[int, Meta(ge=1)]
Duration = Annotated[float, Meta(extra={"unit": "duration"}, extra_json_schema={"x-unit": "duration"})]
Seconds = Annotated[float, Meta(gt=0)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
