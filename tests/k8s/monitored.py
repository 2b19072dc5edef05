"""What alert rules and dashboard ask Prometheus for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from tests.k8s.manifests import overlay


def alert_expressions() -> dict[str, str]:
    rules = yaml.safe_load((overlay("monitoring") / "alerts.yaml").read_text())
    return {rule["alert"]: rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((overlay("monitoring") / "dashboard.json").read_text())
    return found


def panel_expressions() -> dict[str, str]:
    """By panel and number; Grafana's own variable for a range is one that Prometheus takes."""
    return {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$__rate_interval", "5m")
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    }


def relabelled(series: dict[str, str]) -> dict[str, str] | None:
    """What becomes of a series of Ray's metrics port in Prometheus, `__name__` among its labels; None: dropped."""
    monitor = yaml.safe_load((overlay("monitoring") / "podmonitor.yaml").read_text())
    (endpoint,) = [one for one in monitor["spec"]["podMetricsEndpoints"] if one["port"] == "metrics"]
    for rule in endpoint["metricRelabelings"]:
        value = ";".join(series.get(label, "") for label in rule["sourceLabels"])
        match = re.fullmatch(rule["regex"], value)
        if match is None and rule["action"] == "keep":
            return None
        if match is not None and rule["action"] == "replace":
            series = series | {rule["targetLabel"]: match.expand(rule["replacement"].replace("$", "\\"))}
    return series


def names_in(expression: str) -> set[str]:
    """Names of the series that a PromQL expression selects. Raises ValueError for what is no such expression."""
    return {selector.name for selector in _selectors(promql_parser.parse(expression))}


def _selectors(node: Any) -> Iterator[promql_parser.VectorSelector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield node
    elif isinstance(node, promql_parser.MatrixSelector):
        yield node.vector_selector
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _selectors(node.lhs)
        yield from _selectors(node.rhs)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args:
            yield from _selectors(argument)
    elif not isinstance(node, (promql_parser.NumberLiteral, promql_parser.StringLiteral)):
        yield from _selectors(node.expr)


def labels_in(expression: str) -> set[str]:
    """Labels that it matches or groups by."""
    matched = re.findall(r"(\w+)\s*=~?\s*\"", expression)
    grouped = [name for names in re.findall(r"by \(([^)]*)\)", expression) for name in names.split(",")]
    return {*matched, *(name.strip() for name in grouped)}
