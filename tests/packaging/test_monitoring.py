"""The dashboard, the alert rules and the runbook name only what /metrics has and the documents say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from laya.metrics import _STATES, OUTCOMES, GatewayStats, LayaCollector

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy/compose"
RULES = yaml.safe_load((COMPOSE / "prometheus/laya.rules.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((COMPOSE / "grafana/dashboards/laya.json").read_text())
OF_PROMETHEUS = {"job", "instance"}  # put on every sample by the scrape
PROMTOOL = shutil.which("promtool") or shutil.which("promtool", path=ROOT / "build/packaging/prometheus/usr/bin")


def served() -> dict[str, set[str]]:
    """Sample names of the registry behind /metrics, each with its labels."""
    found = {"up": set(OF_PROMETHEUS)}
    for family in LayaCollector(GatewayStats(), list, lambda: 0, dict).collect():
        labels = {*family._labelnames, *OF_PROMETHEUS}
        if family.type == "histogram":
            found |= {f"{family.name}_sum": labels, f"{family.name}_count": labels}
            found[f"{family.name}_bucket"] = labels | {"le"}
        else:
            found[family.name + ("_total" if family.type == "counter" else "")] = labels
    return found


def expressions() -> list[str]:
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [
        variable["query"]["query"].removeprefix("label_values(").rpartition(",")[0]
        for variable in DASHBOARD["templating"]["list"]
    ]
    return [rule["expr"] for rule in RULES] + panels + variables


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_and_label_exists(expression: str) -> None:
    names = served()
    used = set(re.findall(r"\blaya_\w+|\bup\b", expression))
    assert used and used <= set(names), used - set(names)
    for name, matchers in re.findall(r"(laya_\w+|\bup)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        assert labels <= names[name], (name, labels - names[name])
    for grouping in re.findall(r"\bby \(([^)]*)\)", expression):
        asked = {label.strip() for label in grouping.split(",")}
        assert all(asked <= names[name] for name in used), (asked, used)


def test_values_of_labels_exist() -> None:
    text = "\n".join(expressions())
    assert set(re.findall(r'outcome="(\w+)"', text)) <= set(OUTCOMES)
    assert set(re.findall(r'state="(\w+)"', text)) <= set(_STATES)
    guard = (ROOT / "docs/guard.md").read_text()
    for value in re.findall(r'(?:reason|step)=~?"([\w|]+)"', text):
        assert all(re.search(rf"\b{word}\b", guard) for word in value.split("|")), value


def test_each_alert_has_its_part_of_the_runbook_and_a_unit_test() -> None:
    headings = re.findall(r"^## (\w+)", (ROOT / "docs/runbook.md").read_text(), re.M)
    assert headings == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert f"alertname: {rule['alert']}" in Path(__file__).with_name("laya.rules.test.yml").read_text()


def test_what_is_provisioned_is_there() -> None:
    file = COMPOSE / "grafana/provisioning/datasources/prometheus.yaml"
    source = yaml.safe_load(file.read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    host, port = source["url"].removeprefix("http://").split(":")
    assert host in compose["services"] and f":{port}" in compose["services"][host]["ports"][0]
    for service in compose["services"].values():
        assert set(service["secrets"]) <= set(compose["secrets"])
        assert all((COMPOSE / each.split(":")[0]).exists() for each in service["volumes"] if each.startswith("./"))


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: make test-packaging fetches it")
def test_promtool() -> None:
    for words in (
        ["check", "rules", COMPOSE / "prometheus/laya.rules.yml"],
        ["check", "config", "--syntax-only", COMPOSE / "prometheus/prometheus.yml"],
        ["test", "rules", Path(__file__).with_name("laya.rules.test.yml")],
    ):
        done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
