"""The pages hold together: links lead somewhere, each page is in the site, versions and verbs are current."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from typer.main import get_command

from laya.cli.bench import BENCHES
from laya.cli.verbs import VERBS, app_for
from laya.config.flags import FLAGS
from tests.docs.pages import DOCS, PAGES, ROOT, anchors, blocks, commands, inline_commands, links, name_of

TRANSLATED = {"README.zh.md": "README.md", "docs/quickstart.zh.md": "docs/quickstart.md"}
LAB = {"train": "laya/training", "upcycle": "laya/training", "eval": "laya/quantization", "export": "laya/modeling"}
_FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            assert link.startswith("mailto:") or (urlsplit(link).netloc and urlsplit(link).scheme == "https"), link
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


def test_every_page_is_in_the_site_once() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = [name for tree in re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL) for name in _names(tree)]
    assert sorted(listed) == sorted(page.stem for page in DOCS if page.stem != "index")


def _names(tree: str) -> list[str]:
    return [line for line in tree.splitlines() if line and not line.startswith(":")]


@pytest.mark.parametrize("page", TRANSLATED)
def test_translations_have_the_same_commands(page: str) -> None:
    translated, original = ROOT / page, ROOT / TRANSLATED[page]
    assert [block[1:] for block in blocks(translated)] == [block[1:] for block in blocks(original)]
    assert not set(inline_commands(translated)) - set(inline_commands(original))
    assert Path(TRANSLATED[page]).name in links(translated) and Path(page).name in links(original)


def test_versions_are_those_that_the_tests_install() -> None:
    pins = {
        found[1].lower(): found[2]
        for name in ("constraints.txt", "lock.txt")
        if (ROOT / name).exists()
        for found in re.finditer(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(), re.MULTILINE)
    }
    page = (ROOT / "docs" / "tested_with.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)`([^|]*) \| (\S+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 6
    for name, more, version, tests in rows:
        if "JavaScript" in more:
            sdks = json.loads((ROOT / "tests" / "sdk_js" / "package.json").read_text())["dependencies"]
            assert version == sdks[name]
        else:
            assert version == pins[name], name
        module = name.removesuffix("-cpu").replace("-", "_")
        if name not in ("xllamacpp", "auto-round") and not tests.startswith("by hand"):  # these run in a child
            text = "".join((ROOT / "docs" / link).read_text() for link in re.findall(r"\((\S+?\.py)\)", tests)[:1])
            assert module in text, name


COMMANDS = sorted(
    {(name_of(page), words) for page in PAGES for words in inline_commands(page)}
    | {(name_of(page), command.words) for page in PAGES for command in commands(page)}
)


def test_verbs_and_flags_are_those_of_the_command_line() -> None:
    faults = [
        f"{page}: {command}: {fault}"
        for page, command in COMMANDS
        for part in re.findall(r"(?<![\w./])laya (?=[a-z])[^|;>]*", command)
        if (fault := _fault(part.split("  #")[0]))
    ]
    assert not faults, "\n".join(faults)


def _fault(command: str) -> str | None:
    words = command.replace("[", " ").replace("]", " ").split()[1:]
    if not words or words[0] not in VERBS:
        return f"no verb {words[:1]}"
    verb = VERBS[words[0]]
    node = get_command(app_for(words[:1])).commands[words[0]]  # type: ignore[attr-defined]
    if verb.is_group and len(words) > 1:
        if words[1] not in node.commands:
            return f"{words[0]} has no {words[1]}"
        node = node.commands[words[1]]
    options = {name for each in node.params for name in (*each.opts, *each.secondary_opts)} | {"--help", "-h"}
    said = set(_FLAG.findall(" ".join(words)))
    unknown = {flag for flag in said - options if not (verb.takes_flags and _is_known(words, flag))}
    return f"no {', '.join(sorted(unknown))}" if unknown else None


def _is_known(words: list[str], flag: str) -> bool:
    if flag in FLAGS or flag == "--preset" or (flag.startswith("--no-") and f"--{flag[5:]}" in FLAGS):
        return True
    sources: list[Path] = []
    if words[0] in LAB:
        sources = list((ROOT / LAB[words[0]]).glob("*.py"))
    elif words[0] == "bench" and len(words) > 1 and words[1] in BENCHES:
        sources = list((ROOT / "laya" / "bench").glob("*.py"))  # benches share some
    return any(f'"{flag}"' in source.read_text() for source in sources)
