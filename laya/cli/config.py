"""Owns: `laya config`: check, show, example, schema, hash-key, migrate. Knows no server.

Results go to stdout as plain text, so that they can be piped into a file; faults are raised.
"""

from __future__ import annotations

import getpass
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from laya.cli.kept_keys import n_kept_keys
from laya.cli.migrate import migrate
from laya.cli.output import printable
from laya.config.check_routing import targets
from laya.config.document import Document, KeyPath, dotted, read_document
from laya.config.effective import effective
from laya.config.hosts import is_loopback
from laya.config.keys import MIN_KEY_CHARS, hash_key, new_key
from laya.config.load import config_from
from laya.config.places import config_path
from laya.config.reference import SCHEMA_PATH, json_schema
from laya.config.reference import example as example_text
from laya.config.remote import Remote
from laya.config.schema import Config
from laya.engines.arguments import check_args
from laya.errors import ConfigError, LayaError, ModelNotPulled
from laya.gateway.kinds import kind_of
from laya.models import home_path

config_app = typer.Typer(help="Check, show and write config.yaml.", no_args_is_help=True)

File = Annotated[Path | None, typer.Argument(help="The file; default: the one `laya serve` would use.")]
Named = Annotated[Path | None, typer.Option("--config", help="The same, as the other verbs take it.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config_app.command()
def check(file: File = None, config: Named = None, as_json: Json = False) -> None:
    """Say whether the configuration is right, or what is wrong in which line."""
    if file and config:
        raise ConfigError(f"{file} and --config {config}: one file at a time is checked", param="config")
    _check(file or config, as_json)


def _check(file: Path | None, as_json: bool) -> None:
    try:
        document, config, warnings = checked(file)
    except ConfigError as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "file": str(file) if file else None} | error.body()))
        raise typer.Exit(error.exit_code) from None
    name = document.name if document else None
    if not as_json:
        for warning in warnings:
            print(f"warning: {printable(warning)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"ok": True, "file": name, "models": list(config.models), "warnings": warnings}))
    elif name is None:
        print("ok: there is no config.yaml, so every value is the default (`laya config example` writes one)")
    else:
        print(f"ok: {name}, {len(config.models)} model{'' if len(config.models) == 1 else 's'}")


@config_app.command()
def show(file: File = None, as_json: Json = False) -> None:
    """Show every value in effect, defaults included, secrets hidden."""
    document, config = _load(file)
    shown = effective(config, document)
    if as_json:
        print(json.dumps({"file": document.name if document else None} | shown))
        return
    print(f"# from {document.name if document else 'the defaults: there is no config.yaml'}")
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), end="")


@config_app.command()
def example() -> None:
    """Print a config.yaml with every key, its meaning and its default."""
    print(example_text(str(SCHEMA_PATH)), end="")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of config.yaml."""
    print(json.dumps(json_schema(), indent=2))


@config_app.command("migrate")
def migrate_command(
    file: File = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the new file, write nothing.")] = False,
) -> None:
    """Bring the configuration to the newest version of its form; the file as it was stays beside it."""
    migrate(file, dry_run=dry_run)


@config_app.command("hash-key")
def hash_key_command(
    name: Annotated[str, typer.Option(help="Who uses the key.")] = "me",
    stdin: Annotated[bool, typer.Option("--stdin", help="Hash a key you have: typed unseen, or piped in.")] = False,
) -> None:
    """Make an API key and print the entry for server.api_keys; the key itself is printed once and kept nowhere."""
    key = _read_key() if stdin else new_key()
    if not stdin:
        print(f"# the key, for clients; it is not shown again:\n#   {key}")
    print("# for config.yaml:")
    entry = {"server": {"api_keys": [{"name": name, "sha256": hash_key(key)}]}}
    print(yaml.safe_dump(entry, sort_keys=False), end="")


def checked(file: Path | None) -> tuple[Document | None, Config, list[str]]:
    """The configuration with what is to be said of it. Raises ConfigError that names what is wrong, and the line."""
    document, config = _load(file)
    check_engine_arguments(config)
    _check_address(config, document)
    return document, config, _check_models(config, document)


def _load(file: Path | None) -> tuple[Document | None, Config]:
    found = file or config_path(os.environ)
    if found is None:
        return None, Config()
    document = read_document(found, os.environ)
    return document, config_from(document)


def check_engine_arguments(config: Config) -> None:
    """What the engine would refuse at the load is refused now."""
    for name in ("", *config.models):
        model = config.for_model(name)
        where = f"models.{name}.args" if name else "args"
        has_own_engine = model.engine_path is not None
        check_args(model.args, where=where, has_draft=model.draft is not None, native_flags=has_own_engine)


def _check_address(config: Config, document: Document | None) -> None:
    """An open address needs a key, as it does where the server starts."""
    host = config.server.host
    if not is_loopback(host) and not config.server.api_keys and not n_kept_keys():
        raise (document or Document({})).error(
            ("server", "host"),
            f"server.host {host} is open to the network, and there is no key: `laya config hash-key` makes the entry "
            f"for server.api_keys, `laya key create NAME` a key beside it, and `laya serve --lan` one of its own",
        )


def _check_models(config: Config, document: Document | None) -> list[str]:
    """A warning for each model that is not pulled yet. Raises ConfigError for one that names nothing, or is broken."""
    warnings = []
    aliases = {alias: model_id for model_id, entry in config.models.items() for alias in entry.aliases}
    places: dict[str, KeyPath] = {name: ("models", name) for name in config.models}
    places |= {name: path for name, path in targets(config.routing).items() if name not in places | aliases}
    for name, where in places.items():
        try:
            settings = config.for_model(name)
            kind_of(settings).find(settings, models_dir=Path(config.models_dir), home=home_path())
            if settings.program is not None and settings.program.memory_bytes is None:
                warnings.append(f"{dotted(where)}: no memory is declared: its first run gets all that is free")
            if settings.remote is not None:
                warnings += _key_warning(settings.remote, where)
        except ModelNotPulled as error:
            warnings.append(f"{dotted(where)}: {error.message}")
        except LayaError as error:
            message = f"{dotted(where)}: {error.message}"
            raise (document.error(where, message) if document else ConfigError(message)) from None
    return warnings


def _key_warning(remote: Remote, where: KeyPath) -> list[str]:
    """What serves it may have another environment than this command, so it is no error here."""
    warnings = []
    try:
        remote.key()
    except ConfigError as error:
        warnings.append(f"{dotted(where)}: {error.message}")
    if remote.key_env is not None or remote.key_file is not None:
        open_ways = [url.text for url in remote.urls if not url.is_tls and not is_loopback(url.host)]
        warnings += [f"{dotted(where)}: whoever is on the way to {way} reads the key: use https" for way in open_ways]
    return warnings


def _read_key() -> str:
    key = (getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()).strip()
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"the key has {len(key)} characters; with fewer than {MIN_KEY_CHARS} it could be found from its hash. "
            f"`laya config hash-key` makes a good one"
        )
    return key
