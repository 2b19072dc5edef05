"""The whole configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic import ByteSize

from spool.deploy.config.ingress import AuthSettings, GatewaySettings, InternalSettings
from spool.deploy.config.models import DEMO, NGRAM, EngineSection, ModelsSection
from spool.deploy.config.observation import LoggingSettings, MetricsSettings, TracingSettings
from spool.deploy.config.placement import Groups, Placement, WorkerGroup
from spool.deploy.config.section import Section, described
from spool.engine.models.source import DEMO_HEAD
from spool.engine.settings import EngineSettings
from spool.scheduler.config import MAX_RUNNING, Policy, SchedulerConfig
from spool.scheduler.key_class import KeyClass
from spool.scheduler.messages import Role

# What KV gets on a CPU without a setting: memory there is everybody's, and filling it with zeros takes a while.
_LOOPBACK = "127.0.0.1"
_CPU_KV_BYTES = {Role.TARGET: ByteSize(1 << 30), Role.DRAFT: ByteSize(1 << 29)}

# More rows rarely have one length.
_EQUAL_ROWS = 8
_FEWEST_RUNNING = 48


class SchedulingSection(Section):
    """How sequences are admitted and grouped."""

    batch_size: int | None = described(
        None,
        f"Rows of one verify batch. Unset: {_EQUAL_ROWS} with the policies `eqspec` and `exspec`, with others all that "
        "run.",
        ge=1,
    )
    max_running: Annotated[int | None, typer.Option("--max-running", "--max-num-seqs")] = described(
        None,
        "Sequences worked on at a time, for each target. Unset: a quarter of its `max_num_batched_tokens`, at most "
        f"{MAX_RUNNING}; with `batch_size`, four batches or {_FEWEST_RUNNING}.",
        ge=1,
    )
    draft_length: int = described(4, "Tokens proposed per round; 0 decodes plainly.", ge=0, le=64)
    policy: Policy = described(Policy.AUTO, "How verify batches are formed.")
    max_queued_sequences: int = described(
        1024, "Sequences that may wait; more are refused, of keys that have an equal part of them.", ge=1
    )
    max_queued_tokens: int | None = described(None, "Tokens that may wait, prompts and answers. Unset: no bound.", ge=1)
    step_timeout_seconds: float = described(120.0, "Time after which a worker without an answer is lost.", gt=0)
    silence_timeout_seconds: float = described(
        1.0,
        "Time without the answer to a ping after which a worker counts as lost, whatever it computes: its process was "
        "stopped, or it is out of reach.",
        gt=0,
    )

    def problems(self) -> Iterator[str]:
        if self.max_running is not None and self.batch_size is not None and self.max_running < self.batch_size:
            yield f"max_running is {self.max_running}, must be at least batch_size, which is {self.batch_size}"

    def scheduler_config(
        self, drafting: bool, keys: tuple[KeyClass, ...] = (), policy: Policy | None = None
    ) -> SchedulerConfig:
        """For the scheduler core."""
        policy = policy or self.policy
        running = self.max_running
        if running is None and self.batch_size is not None:
            running = max(_FEWEST_RUNNING, 4 * self.batch_size)
        rows = MAX_RUNNING if running is None else running
        if policy in (Policy.EQSPEC, Policy.EXSPEC):
            rows = min(_EQUAL_ROWS, rows)
        return SchedulerConfig(
            batch_size=rows if self.batch_size is None else self.batch_size,
            max_running=running,
            policy=policy,
            draft_length=self.draft_length if drafting else 0,
            max_queued_sequences=self.max_queued_sequences,
            max_queued_tokens=self.max_queued_tokens,
            keys=keys,
        )


class RaySettings(Section):
    """The Ray cluster."""

    address: str | None = described(None, "Ray to join: `auto` or host:port. Unset: one is started.", min_length=1)
    app_name: str = described("spool", "Name of the Serve application.", pattern=r"^[\w.-]{1,64}$")

    def problems(self) -> Iterator[str]:
        address = self.address
        if address is not None and address != "auto" and not re.fullmatch(r"[\w.\[\]:-]+:\d{1,5}", address):
            yield f"address is {address!r}, must be `auto` or host:port"


class SpoolConfig(Section):
    """Everything that one Spool application is made of."""

    models: ModelsSection = described(ModelsSection(), "The models.")
    engine: EngineSection = described(EngineSection(), "The engines of the workers.")
    scheduling: SchedulingSection = described(SchedulingSection(), "What the scheduler does.")
    groups: Groups = described(Groups(), "The workers.")
    scheduler: Placement = described(Placement(), "Where the schedulers run, one of each cell.")
    gateway: GatewaySettings = described(GatewaySettings(), "The HTTP and gRPC ingress.")
    auth: AuthSettings = described(AuthSettings(), "API keys and TLS for clients.")
    internal: InternalSettings = described(InternalSettings(), "How replicas authenticate each other.")
    logging: LoggingSettings = described(LoggingSettings(), "Logs of the replicas.")
    metrics: MetricsSettings = described(MetricsSettings(), "Metrics for Prometheus.")
    tracing: TracingSettings = described(TracingSettings(), "Traces of requests.")
    ray: RaySettings = described(RaySettings(), "The Ray cluster.")

    def problems(self) -> Iterator[str]:
        gateway = self.gateway
        if not gateway.listens_on_loopback and not self.auth.required and not gateway.allow_unauthenticated:
            yield (
                f"gateway.host is {gateway.host!r}, must be loopback such as 127.0.0.1 as long as auth names no API "
                "keys: everybody who reaches the port could use it (gateway.allow_unauthenticated: true allows that)"
            )
        if gateway.receipts and not self.models.exact:
            yield "gateway.receipts is true, must be false where models.exact is false"
        yield from self._inside_problems()
        for role in self.roles:
            limit = self._gpu_limit(role, self.group(role))
            if limit is not None:
                yield f"groups.{role.value}.num_gpus is {self.group(role).num_gpus:g}, {limit}"

    def _inside_problems(self) -> Iterator[str]:
        """Of a draft model or a head in the targets' workers."""
        name, draft, ranks = self.models.draft_name, self.groups.draft, self.engine.tensor_parallel_size
        if not self.drafts_inside and self.draft_head is None:
            return
        why = "models.draft_in is targets" if self.models.draft_in == "targets" else f"{name} is a drafting head"
        for field in ("replicas", "autoscaling"):
            if getattr(draft, field) != getattr(WorkerGroup(), field):
                yield f"groups.draft.{field} is set, must be unset: {why}, so that the targets' workers draft"
                return
        if ranks > 1:
            yield f"engine.tensor_parallel_size is {ranks}, must be 1: the draft {name} runs beside a whole target"

    def without_effect(self) -> list[str]:
        """Fields that are set, and do nothing any more."""
        if self.models.draft_name != NGRAM:
            return []
        # The targets look up.
        draft, default = self.groups.draft, WorkerGroup()
        fields = ("replicas", "autoscaling")
        return [f"groups.draft.{field}" for field in fields if getattr(draft, field) != getattr(default, field)]

    def _gpu_limit(self, role: Role, group: WorkerGroup) -> str | None:
        """What the GPUs of a replica must be instead; None where they are right."""
        gpus, ranks, device = group.num_gpus, self.engine.ranks(role), self.models.device
        if gpus is None:
            return None
        if device == "cpu" and gpus > 0:
            return "must be 0 or unset where models.device is cpu"
        if device == "cuda" and gpus == 0:
            return "must be above 0 where models.device is cuda"
        if ranks == 1 and gpus > 1:
            which = "engine.tensor_parallel_size is 1" if role is Role.TARGET else "a draft computes on one GPU"
            return f"must be at most 1: {which}"
        if ranks > 1 and gpus not in (0, ranks):
            return f"must be 0, {ranks} or unset, as engine.tensor_parallel_size is {ranks}"
        if 0 < gpus < 1 and not self._kv_is_given(group) and not self.pair_shares_a_gpu:
            return (
                f"which needs a kv_memory for the {role.value} group: a replica would take all memory of the GPU that "
                "it shares"
            )
        return None

    def _kv_is_given(self, group: WorkerGroup) -> bool:
        groups = (group, self.groups.draft) if self.drafts_inside else (group,)
        return self.engine.kv_memory is not None or all(each.kv_memory is not None for each in groups)

    def scheduler_config(self) -> SchedulerConfig:
        """For the scheduler core of one cell, with its part of what the keys with a name may have."""
        keys = tuple(key.key_class.part_of(self.groups.cells) for key in self.auth.keys)
        return self.scheduling.scheduler_config(self.models.drafts, keys)

    @property
    def is_one_pair(self) -> bool:
        """Whether there is one target worker and one draft worker, and never more."""
        one_each = len(self.roles) == 2 and all(self.group(role).most == 1 for role in self.roles)
        return self.groups.cells == 1 and one_each

    @property
    def pair_shares_a_gpu(self) -> bool:
        """Whether a draft and a target are on one GPU, and nothing else of this configuration."""
        gpus = [self.group(role).num_gpus or 0.0 for role in self.roles]
        return self.is_one_pair and min(gpus) > 0 and sum(gpus) <= 1

    @property
    def drafts_in_workers(self) -> bool:
        """Whether the draft model has workers of its own. Left open, it has where `groups.draft` says something of
        their number or place, and where it must have them: no target of several ranks runs one."""
        models, group = self.models, self.groups.draft
        asked = models.draft_in == "workers" or group.is_placed or self.engine.tensor_parallel_size > 1
        return models.drafts_with_model and models.draft_in != "targets" and asked

    @property
    def drafts_inside(self) -> bool:
        """Whether a draft model runs in each target's worker."""
        return self.models.drafts_with_model and not self.drafts_in_workers and self.draft_head is None

    @property
    def draft_head(self) -> str | None:
        """The drafting head in each target's worker. Beside the demo target, the demo's draft is one where it has no
        workers."""
        models = self.models
        if models.drafts_with_head:
            return DEMO_HEAD if models.draft_name == DEMO else models.draft_name
        is_demo = models.draft_name == models.target == DEMO and models.draft_kind == "auto"
        return DEMO_HEAD if is_demo and not self.drafts_in_workers else None

    def on_gpus(self, gpus: float) -> SpoolConfig:
        """With draft workers where nothing says how to draft and so many GPUs have room for them beside all targets."""
        models, target = self.models, self.groups.target
        for_each = self.engine.tensor_parallel_size if target.num_gpus is None else target.num_gpus
        room = 0 < for_each <= (gpus / self.groups.cells - 1) / target.most
        if self.drafts_in_workers or not models.drafts_with_model or models.draft_in != "auto":
            return self
        if models.device == "cpu" or not room:
            return self
        return self.model_copy(update={"models": models.model_copy(update={"draft_in": "workers"})})

    @property
    def roles(self) -> tuple[Role, ...]:
        """The groups that there are."""
        return (Role.TARGET, Role.DRAFT) if self.drafts_in_workers else (Role.TARGET,)

    @property
    def served_name(self) -> str:
        # `./folder/` is the folder that `folder` is.
        return self.models.served_model_name or os.path.normpath(self.models.target)

    def group(self, role: Role) -> WorkerGroup:
        return self.groups.target if role is Role.TARGET else self.groups.draft

    @property
    def scales(self) -> bool:
        """Whether any number of replicas follows the load."""
        return any(scaled.autoscaling is not None for scaled in (self.gateway, *map(self.group, self.roles)))

    def model(self, role: Role) -> str:
        return self.models.target if role is Role.TARGET else self.models.draft_name

    def threads(self, role: Role) -> int:
        """Threads of a worker, or of each of its ranks: as asked for, or the CPUs it reserves, or a share of all."""
        group = self.group(role)
        if group.threads is not None:
            return group.threads
        if group.num_cpus >= 1:
            return max(1, int(group.num_cpus) // self.engine.ranks(role))
        busy = self.groups.cells * sum(self.group(other).replicas * self.engine.ranks(other) for other in self.roles)
        return max(1, len(os.sched_getaffinity(0)) // busy)

    def engine_settings(self, role: Role, device: str, threads: int) -> EngineSettings:
        """For a worker of the group on `device`."""
        group = self.group(role)
        memory = self.engine.kv_memory if group.kv_memory is None else group.kv_memory
        if memory is None and device == "cpu":
            memory = _CPU_KV_BYTES[role]
        return self.engine.for_worker(self.models, role, device, threads, memory, self.draft_head)

    def engine_of(self, role: Role, device: str) -> EngineSettings:
        """`engine_settings` with the group's threads."""
        return self.engine_settings(role, device, self.threads(role))

    def on_one_machine(self) -> SpoolConfig:
        """Replicas communicate over loopback and share the cores, unless the file says otherwise."""
        config = self._sharing_cores()
        if self.internal.host is not None:
            return config
        return config.model_copy(update={"internal": self.internal.model_copy(update={"host": _LOOPBACK})})

    def _sharing_cores(self) -> SpoolConfig:
        """One draft worker and one target on the machine each compute on the cores of both, unless the file says
        otherwise: with one batch, a worker computes while the other waits for it."""
        if not self.is_one_pair or self.engine.tensor_parallel_size > 1:
            return self
        both = min(len(os.sched_getaffinity(0)), sum(self.threads(role) for role in self.roles))
        groups = {
            role.value: self.group(role).model_copy(update={"threads": self.group(role).threads or both})
            for role in self.roles
        }
        return self.model_copy(update={"groups": self.groups.model_copy(update=groups)})

    def without_replicas(self) -> SpoolConfig:
        """One replica of each kind, and what else is set about them as it is."""
        one = {"replicas": 1, "autoscaling": None}
        draft, target = self.groups.draft.model_copy(update=one), self.groups.target.model_copy(update=one)
        groups = self.groups.model_copy(update={"draft": draft, "target": target})
        config = self.model_copy(update={"groups": groups, "gateway": self.gateway.model_copy(update=one)})
        if config.roles == self.roles:
            return config
        # The number of draft workers said that there are some.
        return config.model_copy(update={"models": self.models.model_copy(update={"draft_in": "workers"})})

    @property
    def secret_fields(self) -> list[str]:
        """Fields with a secret itself, not the place of one."""
        found = {"auth.api_keys": self.auth.api_keys, "internal.token": self.internal.token}
        return [field for field, value in found.items() if value]

    def without_client_keys(self) -> SpoolConfig:
        """For processes that serve no clients: keys with a name, of which there are only digests, stay."""
        auth = {"api_keys": (), "api_keys_env": None, "api_keys_file": None}
        auth |= {"metrics_keys_env": None, "metrics_keys_file": None}
        gateway = self.gateway.model_copy(update={"allow_unauthenticated": True})
        return self.model_copy(update={"auth": self.auth.model_copy(update=auth), "gateway": gateway})

    def plain(self) -> dict[str, Any]:
        """Plain data from which another process makes the same configuration, secrets and all."""
        return self.model_dump(mode="json", context={"reveal": True}, exclude_defaults=True)
