"""The monitoring overlay: objects of the Prometheus operator, alert rules, and the dashboard."""

from __future__ import annotations

import pytest

from tests.k8s.manifests import Manifest, built, labels_of_pods, only, overlay, pod_specs, validate
from tests.k8s.monitored import relabelled

SECRET_KEYS = {"internal-token", "api-keys", "metrics-key", "hub-token"}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return built(overlay("monitoring"))


def test_objects_fit_the_cell(manifests: list[Manifest]) -> None:
    validate(only(manifests, "ConfigMap"))
    policy = only(manifests, "NetworkPolicy")
    validate(policy)
    monitor = only(manifests, "PodMonitor")["spec"]
    selected = monitor["selector"]["matchLabels"]
    cell = built(overlay("cpu-demo"))
    assert any(selected.items() <= labels.items() for labels in labels_of_pods(cell))
    gateways, ray = monitor["podMetricsEndpoints"]
    assert gateways["port"] in {one["name"] for one in pod_specs(cell)["gateway"]["containers"][0]["ports"]}
    credentials = gateways["authorization"]["credentials"]
    assert (credentials["name"], gateways["path"]) == ("spool-keys", "/metrics")
    assert credentials["key"] in SECRET_KEYS
    # KubeRay gives every container of Ray a port of this name, without a key: the policy says who may ask.
    assert (ray["port"], ray["path"], "authorization" in ray) == ("metrics", "/metrics", False)
    assert [one["ports"] for one in policy["spec"]["ingress"]] == [[{"port": ray["port"]}]]
    assert policy["spec"]["podSelector"]["matchLabels"] == selected


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
