"""Owns: the name of the model in answers of an engine that calls it by another one. Pure: bytes in, bytes out.

A key with its quotes cannot occur inside a JSON string, where quotes are escaped, so events need not be decoded.
"""

from __future__ import annotations

import re

import msgspec

_MODEL = re.compile(rb'"model"\s*:\s*"(?:[^"\\]|\\.)*"')
_ENCODER = msgspec.json.Encoder()
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def renamed_events(events: bytes, name: str) -> bytes:
    """Whole server-sent events of an answer, with the model's own name."""
    said = b'"model":' + _ENCODER.encode(name)
    return _MODEL.sub(lambda _: said, events)


def renamed(body: bytes, name: str) -> bytes:
    """A whole answer with the model's own name; as it came where it is none or is no JSON object."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body
    if "model" not in fields:
        return body
    fields["model"] = msgspec.Raw(_ENCODER.encode(name))
    return _ENCODER.encode(fields)
