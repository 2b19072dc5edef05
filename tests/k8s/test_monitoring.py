"""The monitoring overlay: objects of the Prometheus operator, alert rules, and the dashboard."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import promql_parser
import pytest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tests.k8s.manifests import ROOT, Manifest, built, labels_of_pods, only, overlay, pod_specs, validate
from tests.k8s.monitored import alert_expressions, dashboard, names_in, panel_expressions, relabelled

SECRET_KEYS = {"internal-token", "api-keys", "metrics-key", "hub-token"}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def _duration(text: str) -> str:
    assert re.fullmatch(r"(\d+(ms|s|m|h|d))+", text)
    return text


Duration = Annotated[str, AfterValidator(_duration)]
Labels = dict[str, str]


class Metadata(Strict):
    name: str
    namespace: str
    labels: Labels


class SecretKey(Strict):
    name: str
    key: str


class Authorization(Strict):
    type: Literal["Bearer"]
    credentials: SecretKey


class Relabeling(Strict):
    action: Literal["keep", "replace"]
    source_labels: list[str] = Field(alias="sourceLabels")
    regex: str
    replacement: str = "$1"
    target_label: str | None = Field(None, alias="targetLabel")


class Endpoint(Strict):
    port: str
    path: str
    interval: Duration
    authorization: Authorization | None = None
    relabelings: list[Relabeling] = Field([], alias="metricRelabelings")


class Selector(Strict):
    match_labels: Labels = Field(alias="matchLabels")


class PodMonitorSpec(Strict):
    selector: Selector
    endpoints: list[Endpoint] = Field(alias="podMetricsEndpoints", min_length=1)


class PodMonitor(Strict):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["PodMonitor"]
    metadata: Metadata
    spec: PodMonitorSpec


class Rule(Strict):
    alert: str = Field(pattern="^Spool[A-Z][A-Za-z]+$")
    expr: str
    hold: Duration = Field("0s", alias="for")
    labels: dict[Literal["severity"], Literal["critical", "warning", "info"]]
    annotations: dict[Literal["summary"], str]


class RuleGroup(Strict):
    name: str
    rules: list[Rule] = Field(min_length=1)


class RuleSpec(Strict):
    groups: list[RuleGroup] = Field(min_length=1)


class PrometheusRule(Strict):
    api_version: Literal["monitoring.coreos.com/v1"] = Field(alias="apiVersion")
    kind: Literal["PrometheusRule"]
    metadata: Metadata
    spec: RuleSpec


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return built(overlay("monitoring"))


def test_objects_are_valid(manifests: list[Manifest]) -> None:
    monitor = PodMonitor.model_validate(only(manifests, "PodMonitor"))
    rules = PrometheusRule.model_validate(only(manifests, "PrometheusRule"))
    names = [rule.alert for group in rules.spec.groups for rule in group.rules]
    assert len(names) == len(set(names)) > 10
    validate(only(manifests, "ConfigMap"))
    policy = only(manifests, "NetworkPolicy")
    validate(policy)
    assert len(manifests) == 4
    cell = built(overlay("cpu-demo"))
    assert any(monitor.spec.selector.match_labels.items() <= labels.items() for labels in labels_of_pods(cell))
    gateways, ray = monitor.spec.endpoints
    assert gateways.port in {one["name"] for one in pod_specs(cell)["gateway"]["containers"][0]["ports"]}
    assert gateways.authorization is not None
    assert (gateways.authorization.credentials.name, gateways.path) == ("spool-keys", "/metrics")
    assert gateways.authorization.credentials.key in SECRET_KEYS
    # KubeRay gives every container of Ray a port of this name, without a key: the policy says who may ask.
    assert (ray.port, ray.authorization, ray.path) == ("metrics", None, "/metrics")
    assert [one["ports"] for one in policy["spec"]["ingress"]] == [[{"port": ray.port}]]
    assert policy["spec"]["podSelector"]["matchLabels"] == monitor.spec.selector.match_labels


def test_of_rays_figures_the_schedulers_are_taken_under_their_own_names() -> None:
    series = [
        {"__name__": "ray_spool_workers", "deployment": "Scheduler", "role": "draft"},
        {"__name__": "ray_spool_prompt_tokens_total", "deployment": "Gateway"},
        {"__name__": "ray_serve_num_router_requests", "deployment": "Scheduler"},
        {"__name__": "ray_node_cpu_count"},
        {"__name__": "ray_vllm_num_requests_running", "deployment": "Scheduler", "model_name": "m"},
        {"__name__": "ray_vllm_prompt_tokens_total", "deployment": "Gateway"},
    ]
    ours = series[0] | {"__name__": "spool_workers"}
    theirs = series[4] | {"__name__": "vllm:num_requests_running"}
    assert [relabelled(one) for one in series] == [ours, None, None, None, theirs, None]


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("PodMonitor", "spec.podMetricsEndpoint", []),
        ("PodMonitor", "spec.podMetricsEndpoints.0.pth", "/"),
        ("PrometheusRule", "spec.groups.0.rules.0.exp", "1"),
        ("PrometheusRule", "spec.groups.0.rules.0.for", "5 minutes"),
        ("PrometheusRule", "spec.groups.0.rules.0.labels.severity", "grave"),
    ],
)
def test_what_is_misspelt_is_refused(manifests: list[Manifest], kind: str, path: str, value: Any) -> None:
    manifest = json.loads(json.dumps(only(manifests, kind)))
    place = manifest
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step) if step.isdigit() else step]
    place[last] = value
    models: dict[str, type[Strict]] = {"PodMonitor": PodMonitor, "PrometheusRule": PrometheusRule}
    with pytest.raises(ValidationError):
        models[kind].model_validate(manifest)


def test_expressions_are_promql() -> None:
    expressions = {**alert_expressions(), **panel_expressions()}
    assert len(expressions) > 30
    for title, expression in expressions.items():
        assert names_in(expression), title
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("rate(spool_generation_tokens_total[5m]")


def test_the_dashboard_is_the_one_in_the_config_map(manifests: list[Manifest]) -> None:
    stored = only(manifests, "ConfigMap")
    assert json.loads(stored["data"]["dashboard.json"]) == dashboard()
    assert stored["metadata"]["labels"]["grafana_dashboard"] == "1"
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))


def test_every_alert_is_explained_in_the_runbook() -> None:
    runbook = (ROOT / "docs" / "operations.md").read_text()
    explained = set(re.findall(r"^\| `(Spool\w+)` \|", runbook, re.MULTILINE))
    assert explained == set(alert_expressions())
