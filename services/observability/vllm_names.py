"""vLLM's names for metrics of ours, for dashboards and tools that know those.

Names and labels are those of vLLM 0.32 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py). Nothing is counted
here: each alias repeats the samples of the metric that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from services.observability.metric_set import PREFIX

VLLM_PREFIX = "vllm:"

# vLLM numbers its data-parallel engines. A cell is one engine.
_ENGINE = {"engine": "0"}


@dataclass(frozen=True, slots=True)
class Alias:
    """A metric that has `name` here after `spool_`, and in vLLM after `vllm:`; a counter's name ends with `_total`.

    `only` are the values of labels that vLLM does not have: samples with other values are left out.
    """

    name: str
    only: Mapping[str, str] = field(default_factory=dict)

    @property
    def ours(self) -> str:
        return f"{PREFIX}{self.name}"

    @property
    def theirs(self) -> str:
        return f"{VLLM_PREFIX}{self.name}"


# vLLM's prefix cache is that of its target; it has none for drafts.
_OF_TARGETS = {"role": "target"}

ALIASES = (
    # Of gateways.
    Alias("request_success_total"),
    Alias("prompt_tokens_total"),
    Alias("generation_tokens_total"),
    Alias("time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds"),
    Alias("request_time_per_output_token_seconds"),
    Alias("e2e_request_latency_seconds"),
    Alias("request_prompt_tokens"),
    Alias("request_generation_tokens"),
    # Of schedulers.
    Alias("num_requests_running"),
    Alias("num_requests_waiting"),
    Alias("request_queue_time_seconds"),
    Alias("num_preemptions_total"),
    Alias("kv_cache_usage_perc"),
    Alias("prefix_cache_queries_total", _OF_TARGETS),
    Alias("prefix_cache_hits_total", _OF_TARGETS),
    Alias("spec_decode_num_drafts_total"),
    Alias("spec_decode_num_draft_tokens_total"),
    Alias("spec_decode_num_accepted_tokens_total"),
    Alias("spec_decode_num_accepted_tokens_per_pos_total"),
)
_BY_FAMILY = {alias.ours.removesuffix("_total"): alias for alias in ALIASES}


def with_vllm_names(families: Iterable[Family], model_name: str) -> Iterator[Family]:
    """The families, each that vLLM has too followed by its alias, with vLLM's labels `model_name` and `engine`."""
    labels = {"model_name": model_name, **_ENGINE}
    for family in families:
        yield family
        alias = _BY_FAMILY.get(family.name)
        if alias is not None:
            yield _renamed(family, alias, labels)


def _renamed(family: Family, alias: Alias, labels: Mapping[str, str]) -> Family:
    told = Family(family.name.replace(PREFIX, VLLM_PREFIX, 1), family.documentation, family.type)
    told.samples = [
        Sample(
            sample.name.replace(PREFIX, VLLM_PREFIX, 1),
            {**labels, **{name: value for name, value in sample.labels.items() if name not in alias.only}},
            sample.value,
        )
        for sample in family.samples
        if all(sample.labels.get(name) == value for name, value in alias.only.items())
    ]
    return told
