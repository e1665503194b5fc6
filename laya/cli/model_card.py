"""Owns: what `laya show` and every `--json` say of one model: from the library, the catalogue and the file's header."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console

from laya.cli.fit import Fit, fit_sentence
from laya.cli.output import shown
from laya.memory import read_facts, read_header
from laya.models import ModelCard, size_text
from laya.models.files import shard_paths
from laya.types import ModelFile


def file_fields(model: ModelFile) -> dict[str, Any]:
    """A model on this disk, as JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(model, enc_hook=str)
    del fields["chat_template"]
    return fields


def card_fields(card: ModelCard) -> dict[str, Any]:
    """What is known without opening the file."""
    fields: dict[str, Any] = file_fields(card.file) if card.file else {"id": card.id, "path": None}
    if card.manifest is not None:
        fields |= {"licence": card.manifest.licence, "pulled_at": card.manifest.pulled_at}
        fields["files"] = msgspec.to_builtins(card.manifest.files)
    if card.entry is not None:
        entry = card.entry
        fields |= {"licence": entry.licence, "parameters": entry.parameters, "what_for": entry.what_for}
        fields |= {"source": entry.source, "task": entry.task, "shape": msgspec.to_builtins(entry.shape)}
        fields.setdefault("file_bytes", entry.file_bytes)
        fields["template"] = "Laya's own" if entry.chat_template else None
    return fields


def header_fields(model: ModelFile) -> dict[str, Any]:
    """What the header says: shape, template, tensors by type. Raises: BadModelFile."""
    if model.format != "gguf":
        return {}
    shape = read_facts(model.path).shape
    tensors: dict[str, dict[str, int]] = {}
    for shard in shard_paths(model.path):
        for tensor in read_header(shard).tensors:
            of_type = tensors.setdefault(tensor.type_name, {"count": 0, "bytes": 0})
            of_type["count"] += 1
            of_type["bytes"] += tensor.n_bytes
    fields = {name: value for name, value in msgspec.to_builtins(shape).items() if name != "chat_template"}
    built_in = "in the file" if shape.chat_template else "none"
    return {"shape": fields, "tensors": tensors, "template": "Laya's own" if model.chat_template else built_in}


def print_card(fields: dict[str, Any], fit: Fit) -> None:
    """The card as people read it, on stdout."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold]{shown(fields['id'])}[/]   {fields.get('what_for') or ''}")
    shape = fields.get("shape") or {}
    lines = {
        "file": shown(fields["path"] or "") or f"not here: laya pull {fields['id']}",
        "size": size_text(fields["file_bytes"]),
        "source": shown(fields.get("source") or ""),
        "licence": shown(fields.get("licence") or ""),
        "sha256": ", ".join(file["sha256"] for file in fields.get("files", []) if file["sha256"]),
        "shape": shown(_shape_text(shape)) if shape else None,
        "template": fields.get("template"),
        "tensors": ",  ".join(
            f"{kind} {of_type['count']} ({size_text(of_type['bytes'])})"
            for kind, of_type in fields.get("tensors", {}).items()
        ),
        "memory": fit_sentence(fit),
    }
    for title, text in lines.items():
        if text:
            console.print(f" [dim]{title:9}[/] {text}")


def _shape_text(shape: dict[str, Any]) -> str:
    heads, kv = (
        max(value) if isinstance(value, (list, tuple)) else value for value in (shape["n_head"], shape["n_head_kv"])
    )
    experts = f", {shape['n_expert_used']} of {shape['n_expert']} experts" if shape["n_expert"] else ""
    return (
        f"{shape['architecture']}, {shape['n_layer']} layers of {shape['n_embd']}, {heads} heads ({kv} KV){experts}, "
        f"vocabulary {shape['n_vocab']}, trained for {shape['n_ctx_train']} tokens"
    )
