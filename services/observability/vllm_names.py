"""vLLM's names for metrics of ours, for dashboards and tools that know those.

Names and labels are those of vLLM 0.32 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py). Nothing is counted
here: each alias repeats the samples of the metric that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from spool.services.observability.metric_set import PREFIX

VLLM_PREFIX = "vllm:"

# vLLM numbers its data-parallel engines. A cell is one engine.
_ENGINE = {"engine": "0"}


# vLLM's prefix cache is that of its target: samples of other roles are left out, and the label as well.
_ROLE = "role"

ALIASES = (
    # Of gateways.
    "request_success_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    # Of schedulers.
    "num_requests_running",
    "num_requests_waiting",
    "request_queue_time_seconds",
    "num_preemptions_total",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)
"""What follows `spool_` in our names and `vllm:` in vLLM's; a counter's ends with `_total`."""
_FAMILIES = {f"{PREFIX}{name.removesuffix('_total')}" for name in ALIASES}


def with_vllm_names(families: Iterable[Family], model_name: str) -> Iterator[Family]:
    """The families, each that vLLM has too followed by its alias, with vLLM's labels `model_name` and `engine`."""
    labels = {"model_name": model_name, **_ENGINE}
    for family in families:
        yield family
        if family.name in _FAMILIES:
            yield _renamed(family, labels)


def _renamed(family: Family, labels: Mapping[str, str]) -> Family:
    renamed = Family(family.name.replace(PREFIX, VLLM_PREFIX, 1), family.documentation, family.type)
    renamed.samples = [
        Sample(
            sample.name.replace(PREFIX, VLLM_PREFIX, 1),
            {**labels, **{name: value for name, value in sample.labels.items() if name != _ROLE}},
            sample.value,
        )
        for sample in family.samples
        if sample.labels.get(_ROLE, "target") == "target"
    ]
    return renamed
