"""Container, compose and Kubernetes agree with Laya and with each other: paths, ports, users, keys, limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from laya.config import load_config

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "deploy/compose/compose.yaml").read_text())
MANIFESTS = {each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy/kubernetes/laya.yaml").read_text())}
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]


def test_the_build_gets_what_it_copies_and_nothing_else() -> None:
    copied = {word for line in re.findall(r"^COPY (?!--)(.*)$", DOCKERFILE, re.M) for word in line.split()[:-1]}
    let_in = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert copied == let_in and all((ROOT / name).exists() for name in copied)


def test_last_stages_have_no_build_tools_and_no_root() -> None:
    last = DOCKERFILE[DOCKERFILE.index(" AS cpu") :]
    assert not re.search(r"g\+\+|python3-dev|pip install|cmake", last)
    (user,) = set(re.findall(r"^USER (\d+):\1$", last, re.M))
    assert user != "0" and f"--uid {user}" in last
    assert str(POD["securityContext"]["runAsUser"]) == str(POD["securityContext"]["fsGroup"]) == user


def test_volumes_are_where_laya_keeps_its_things() -> None:
    (home,) = re.findall(r"^VOLUME (\S+)$", DOCKERFILE, re.M)
    assert f"LAYA_HOME={home}" in DOCKERFILE
    assert f"data:{home}" in COMPOSE["services"]["laya"]["volumes"]
    assert home in {mount["mountPath"] for mount in POD["containers"][0]["volumeMounts"]}


def test_probes_ask_what_there_is() -> None:
    app = (ROOT / "laya/gateway/app.py").read_text()
    container = POD["containers"][0]
    asked = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    asked += re.findall(r"http://127.0.0.1:8000(/\w+)", DOCKERFILE)
    assert all(f'Route("{path}"' in app for path in asked)
    assert asked == ["/health", "/health", "/ready", "/health"]


def test_what_laya_plans_with_is_its_own() -> None:
    """A limit above what is requested would be planned with, and lent by the node to others; swap would be counted."""
    resources = POD["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert "cpu" not in resources["limits"]
    laya = COMPOSE["services"]["laya"]
    assert laya["mem_limit"] == laya["memswap_limit"]


@pytest.mark.parametrize("kind", ["compose", "kubernetes"])
def test_the_configurations_are_right(kind: str, tmp_path: Path) -> None:
    if kind == "compose":
        text, keys = (ROOT / "deploy/compose/laya.yaml").read_text(), "/run/secrets/"
        mounted = set(COMPOSE["services"]["laya"]["secrets"])
    else:
        text, keys = MANIFESTS["ConfigMap"]["data"]["config.yaml"], "/etc/laya/keys/"
        mounted = {"admin", "metrics"}
    named = set(re.findall(rf"key_file: {keys}(\w+)", text))
    assert named == mounted
    for name in named:
        (tmp_path / name).write_text(name.ljust(48, "0"))
    file = tmp_path / "config.yaml"
    file.write_text(text.replace(keys, f"{tmp_path}/"))
    config = load_config(file, {})
    assert config.server.host == "0.0.0.0"
    assert [key.role for key in config.server.api_keys] == ["admin", "metrics"]


def test_prometheus_scrapes_laya_with_a_key() -> None:
    scrape = yaml.safe_load((ROOT / "deploy/compose/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["laya:8000"] and "laya" in COMPOSE["services"]
    assert Path(scrape["authorization"]["credentials_file"]).name in COMPOSE["services"]["prometheus"]["secrets"]


def test_every_issue_form_asks_for_the_bundle() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 3
    for form in forms:
        said = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= said.keys()
        assert any("laya doctor --bundle" in str(part.get("attributes", {}).get("label")) for part in said["body"])
