from spool.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_END_UNSPECIFIED: _ClassVar[SequenceEnd]
    SEQUENCE_END_STOP: _ClassVar[SequenceEnd]
    SEQUENCE_END_LENGTH: _ClassVar[SequenceEnd]
    SEQUENCE_END_CANCELLED: _ClassVar[SequenceEnd]

class FailureCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CAUSE_UNSPECIFIED: _ClassVar[FailureCause]
    FAILURE_CAUSE_WORKER: _ClassVar[FailureCause]
    FAILURE_CAUSE_DEADLINE_EXCEEDED: _ClassVar[FailureCause]
    FAILURE_CAUSE_NO_TARGET: _ClassVar[FailureCause]

class RefusalCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_CAUSE_UNSPECIFIED: _ClassVar[RefusalCause]
    REFUSAL_CAUSE_QUEUE_FULL: _ClassVar[RefusalCause]
    REFUSAL_CAUSE_TOO_LONG: _ClassVar[RefusalCause]
    REFUSAL_CAUSE_INVALID: _ClassVar[RefusalCause]
    REFUSAL_CAUSE_KEY_LIMIT: _ClassVar[RefusalCause]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_IN_USE: _ClassVar[WorkerState]
    WORKER_STATE_REFUSED: _ClassVar[WorkerState]
    WORKER_STATE_UNREACHABLE: _ClassVar[WorkerState]
    WORKER_STATE_LEAVING: _ClassVar[WorkerState]

class SchedulerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCHEDULER_STATE_UNSPECIFIED: _ClassVar[SchedulerState]
    SCHEDULER_STATE_SERVING: _ClassVar[SchedulerState]
    SCHEDULER_STATE_FENCED: _ClassVar[SchedulerState]
    SCHEDULER_STATE_CLOSED: _ClassVar[SchedulerState]
SEQUENCE_END_UNSPECIFIED: SequenceEnd
SEQUENCE_END_STOP: SequenceEnd
SEQUENCE_END_LENGTH: SequenceEnd
SEQUENCE_END_CANCELLED: SequenceEnd
FAILURE_CAUSE_UNSPECIFIED: FailureCause
FAILURE_CAUSE_WORKER: FailureCause
FAILURE_CAUSE_DEADLINE_EXCEEDED: FailureCause
FAILURE_CAUSE_NO_TARGET: FailureCause
REFUSAL_CAUSE_UNSPECIFIED: RefusalCause
REFUSAL_CAUSE_QUEUE_FULL: RefusalCause
REFUSAL_CAUSE_TOO_LONG: RefusalCause
REFUSAL_CAUSE_INVALID: RefusalCause
REFUSAL_CAUSE_KEY_LIMIT: RefusalCause
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_IN_USE: WorkerState
WORKER_STATE_REFUSED: WorkerState
WORKER_STATE_UNREACHABLE: WorkerState
WORKER_STATE_LEAVING: WorkerState
SCHEDULER_STATE_UNSPECIFIED: SchedulerState
SCHEDULER_STATE_SERVING: SchedulerState
SCHEDULER_STATE_FENCED: SchedulerState
SCHEDULER_STATE_CLOSED: SchedulerState

class SessionRequest(_message.Message):
    __slots__ = ("opening", "submissions", "cancelled_request_ids")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    opening: SessionOpening
    submissions: _containers.RepeatedCompositeFieldContainer[SequenceSubmission]
    cancelled_request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, opening: _Optional[_Union[SessionOpening, _Mapping]] = ..., submissions: _Optional[_Iterable[_Union[SequenceSubmission, _Mapping]]] = ..., cancelled_request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionOpening(_message.Message):
    __slots__ = ("gateway_id", "protocol_version", "oldest_protocol_version", "version")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    protocol_version: int
    oldest_protocol_version: int
    version: str
    def __init__(self, gateway_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class SequenceSubmission(_message.Message):
    __slots__ = ("request_id", "prompt", "max_tokens", "stop_token_ids", "sampling", "draft_length", "top_logprobs", "committed_output", "admitted_before", "timeout_seconds", "client_request_id", "traceparent", "key", "priority", "prompt_logprobs", "suspicion", "cache_scope", "logits_digests", "expected_output", "fingerprint", "proposer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROPOSER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _worker_pb2.SamplingParameters
    draft_length: int
    top_logprobs: int
    committed_output: _containers.RepeatedScalarFieldContainer[int]
    admitted_before: bool
    timeout_seconds: float
    client_request_id: str
    traceparent: str
    key: str
    priority: int
    prompt_logprobs: int
    suspicion: Suspicion
    cache_scope: bytes
    logits_digests: bool
    expected_output: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: str
    proposer: str
    def __init__(self, request_id: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_worker_pb2.SamplingParameters, _Mapping]] = ..., draft_length: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., committed_output: _Optional[_Iterable[int]] = ..., admitted_before: _Optional[bool] = ..., timeout_seconds: _Optional[float] = ..., client_request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., key: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., suspicion: _Optional[_Union[Suspicion, _Mapping]] = ..., cache_scope: _Optional[bytes] = ..., logits_digests: _Optional[bool] = ..., expected_output: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[str] = ..., proposer: _Optional[str] = ...) -> None: ...

class Suspicion(_message.Message):
    __slots__ = ("count", "tokens")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    count: int
    tokens: int
    def __init__(self, count: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("scheduler_epoch", "opened", "events", "load")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    opened: SessionOpened
    events: _containers.RepeatedCompositeFieldContainer[SequenceEvent]
    load: CellLoad
    def __init__(self, scheduler_epoch: _Optional[int] = ..., opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., events: _Optional[_Iterable[_Union[SequenceEvent, _Mapping]]] = ..., load: _Optional[_Union[CellLoad, _Mapping]] = ...) -> None: ...

class CellLoad(_message.Message):
    __slots__ = ("targets", "sequences_of_others")
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_OF_OTHERS_FIELD_NUMBER: _ClassVar[int]
    targets: int
    sequences_of_others: int
    def __init__(self, targets: _Optional[int] = ..., sequences_of_others: _Optional[int] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("lease_seconds", "protocol_version", "oldest_protocol_version")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    protocol_version: int
    oldest_protocol_version: int
    def __init__(self, lease_seconds: _Optional[float] = ..., protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ...) -> None: ...

class SequenceEvent(_message.Message):
    __slots__ = ("request_id", "admitted", "tokens", "drafted", "accepted", "logprobs", "finished", "failed", "refused", "prompt_logprobs", "cached_prompt_tokens", "suspicion", "fingerprints", "logits_digests", "queue_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUSPICION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    admitted: bool
    tokens: _containers.RepeatedScalarFieldContainer[int]
    drafted: int
    accepted: int
    logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    finished: SequenceEnd
    failed: SequenceFailure
    refused: SequenceRefusal
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_worker_pb2.TokenLogprobs]
    cached_prompt_tokens: int
    suspicion: Suspicion
    fingerprints: _containers.RepeatedCompositeFieldContainer[Fingerprint]
    logits_digests: _containers.RepeatedScalarFieldContainer[int]
    queue_seconds: float
    def __init__(self, request_id: _Optional[int] = ..., admitted: _Optional[bool] = ..., tokens: _Optional[_Iterable[int]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., finished: _Optional[_Union[SequenceEnd, str]] = ..., failed: _Optional[_Union[SequenceFailure, _Mapping]] = ..., refused: _Optional[_Union[SequenceRefusal, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_worker_pb2.TokenLogprobs, _Mapping]]] = ..., cached_prompt_tokens: _Optional[int] = ..., suspicion: _Optional[_Union[Suspicion, _Mapping]] = ..., fingerprints: _Optional[_Iterable[_Union[Fingerprint, _Mapping]]] = ..., logits_digests: _Optional[_Iterable[int]] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("parts", "worker_id")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PARTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.ScalarMap[str, str]
    worker_id: str
    def __init__(self, parts: _Optional[_Mapping[str, str]] = ..., worker_id: _Optional[str] = ...) -> None: ...

class SequenceFailure(_message.Message):
    __slots__ = ("cause", "message")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    cause: FailureCause
    message: str
    def __init__(self, cause: _Optional[_Union[FailureCause, str]] = ..., message: _Optional[str] = ...) -> None: ...

class SequenceRefusal(_message.Message):
    __slots__ = ("cause", "message", "retry_after_seconds")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    cause: RefusalCause
    message: str
    retry_after_seconds: float
    def __init__(self, cause: _Optional[_Union[RefusalCause, str]] = ..., message: _Optional[str] = ..., retry_after_seconds: _Optional[float] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "address", "description", "highest_scheduler_epoch", "busy_seconds", "queued")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    description: _worker_pb2.WorkerDescription
    highest_scheduler_epoch: int
    busy_seconds: float
    queued: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., description: _Optional[_Union[_worker_pb2.WorkerDescription, _Mapping]] = ..., highest_scheduler_epoch: _Optional[int] = ..., busy_seconds: _Optional[float] = ..., queued: _Optional[int] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("scheduler_epoch", "state", "reason")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    state: WorkerState
    reason: str
    def __init__(self, scheduler_epoch: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "worker_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    worker_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., worker_epoch: _Optional[int] = ...) -> None: ...

class DeregisterReply(_message.Message):
    __slots__ = ("scheduler_epoch",)
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    def __init__(self, scheduler_epoch: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("scheduler_epoch", "uptime_seconds", "state", "reason", "sessions", "gateways", "version", "workers", "model", "live_set", "groups", "throughput", "prefix_cache", "kv_moves", "speculation", "replicas", "drafting")
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIVE_SET_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    KV_MOVES_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    scheduler_epoch: int
    uptime_seconds: float
    state: SchedulerState
    reason: str
    sessions: int
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    version: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    model: ServedModel
    live_set: LiveSetFigures
    groups: GroupFigures
    throughput: ThroughputFigures
    prefix_cache: _containers.RepeatedCompositeFieldContainer[PrefixCacheFigures]
    kv_moves: KvMoveFigures
    speculation: SpeculationFigures
    replicas: ReplicaFigures
    drafting: _containers.RepeatedCompositeFieldContainer[DraftingFigures]
    def __init__(self, scheduler_epoch: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., state: _Optional[_Union[SchedulerState, str]] = ..., reason: _Optional[str] = ..., sessions: _Optional[int] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., version: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., model: _Optional[_Union[ServedModel, _Mapping]] = ..., live_set: _Optional[_Union[LiveSetFigures, _Mapping]] = ..., groups: _Optional[_Union[GroupFigures, _Mapping]] = ..., throughput: _Optional[_Union[ThroughputFigures, _Mapping]] = ..., prefix_cache: _Optional[_Iterable[_Union[PrefixCacheFigures, _Mapping]]] = ..., kv_moves: _Optional[_Union[KvMoveFigures, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationFigures, _Mapping]] = ..., replicas: _Optional[_Union[ReplicaFigures, _Mapping]] = ..., drafting: _Optional[_Iterable[_Union[DraftingFigures, _Mapping]]] = ...) -> None: ...

class DraftingFigures(_message.Message):
    __slots__ = ("target_id", "draft_id", "draft_length", "gain", "tokens_per_second", "acceptance", "explanation", "lookup_share", "lookup_length", "lookup_acceptance")
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GAIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_SHARE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    target_id: str
    draft_id: str
    draft_length: int
    gain: float
    tokens_per_second: float
    acceptance: _containers.RepeatedScalarFieldContainer[float]
    explanation: str
    lookup_share: float
    lookup_length: int
    lookup_acceptance: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, target_id: _Optional[str] = ..., draft_id: _Optional[str] = ..., draft_length: _Optional[int] = ..., gain: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., acceptance: _Optional[_Iterable[float]] = ..., explanation: _Optional[str] = ..., lookup_share: _Optional[float] = ..., lookup_length: _Optional[int] = ..., lookup_acceptance: _Optional[_Iterable[float]] = ...) -> None: ...

class ReplicaFigures(_message.Message):
    __slots__ = ("explanation", "wanted")
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    explanation: str
    wanted: _containers.RepeatedCompositeFieldContainer[WantedReplicas]
    def __init__(self, explanation: _Optional[str] = ..., wanted: _Optional[_Iterable[_Union[WantedReplicas, _Mapping]]] = ...) -> None: ...

class WantedReplicas(_message.Message):
    __slots__ = ("role", "replicas")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    role: _worker_pb2.Role
    replicas: int
    def __init__(self, role: _Optional[_Union[_worker_pb2.Role, str]] = ..., replicas: _Optional[int] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "version")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    version: str
    def __init__(self, gateway_id: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "address", "state", "reason", "model_id", "device", "dtype", "worker_epoch", "process_id", "sequences", "free_pages", "total_pages", "page_size", "steps_in_flight", "quantization", "fingerprint", "busy_share", "queued", "version")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _worker_pb2.Role
    address: str
    state: WorkerState
    reason: str
    model_id: str
    device: str
    dtype: str
    worker_epoch: int
    process_id: int
    sequences: int
    free_pages: int
    total_pages: int
    page_size: int
    steps_in_flight: int
    quantization: str
    fingerprint: _containers.ScalarMap[str, str]
    busy_share: float
    queued: int
    version: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., reason: _Optional[str] = ..., model_id: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., process_id: _Optional[int] = ..., sequences: _Optional[int] = ..., free_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., quantization: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., busy_share: _Optional[float] = ..., queued: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("model_id", "vocabulary_size", "max_sequence_length", "tokenizer_digest", "quantization", "fingerprint")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    vocabulary_size: int
    max_sequence_length: int
    tokenizer_digest: bytes
    quantization: str
    fingerprint: _containers.ScalarMap[str, str]
    def __init__(self, model_id: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., tokenizer_digest: _Optional[bytes] = ..., quantization: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LiveSetFigures(_message.Message):
    __slots__ = ("live", "waiting", "running", "prefilling", "idle", "verifying", "max_running", "queue_limit", "moving")
    LIVE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    live: int
    waiting: int
    running: int
    prefilling: int
    idle: int
    verifying: int
    max_running: int
    queue_limit: int
    moving: int
    def __init__(self, live: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., prefilling: _Optional[int] = ..., idle: _Optional[int] = ..., verifying: _Optional[int] = ..., max_running: _Optional[int] = ..., queue_limit: _Optional[int] = ..., moving: _Optional[int] = ...) -> None: ...

class KvMoveFigures(_message.Message):
    __slots__ = ("moves", "positions", "bytes", "seconds", "failed", "rehomed")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REHOMED_FIELD_NUMBER: _ClassVar[int]
    moves: int
    positions: int
    bytes: int
    seconds: float
    failed: int
    rehomed: int
    def __init__(self, moves: _Optional[int] = ..., positions: _Optional[int] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failed: _Optional[int] = ..., rehomed: _Optional[int] = ...) -> None: ...

class GroupFigures(_message.Message):
    __slots__ = ("groups", "mean_size", "equal_length_share", "forced", "batch_size")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_SIZE_FIELD_NUMBER: _ClassVar[int]
    EQUAL_LENGTH_SHARE_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    groups: int
    mean_size: float
    equal_length_share: float
    forced: int
    batch_size: int
    def __init__(self, groups: _Optional[int] = ..., mean_size: _Optional[float] = ..., equal_length_share: _Optional[float] = ..., forced: _Optional[int] = ..., batch_size: _Optional[int] = ...) -> None: ...

class PrefixCacheFigures(_message.Message):
    __slots__ = ("role", "queries", "hits")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    role: _worker_pb2.Role
    queries: int
    hits: int
    def __init__(self, role: _Optional[_Union[_worker_pb2.Role, str]] = ..., queries: _Optional[int] = ..., hits: _Optional[int] = ...) -> None: ...

class ThroughputFigures(_message.Message):
    __slots__ = ("tokens", "tokens_per_second", "finished", "failed", "refused", "rounds", "acceptance_rate", "committed_per_round", "target_busy_share", "preemptions", "workers_lost")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_PER_ROUND_FIELD_NUMBER: _ClassVar[int]
    TARGET_BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_LOST_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    tokens_per_second: float
    finished: int
    failed: int
    refused: int
    rounds: int
    acceptance_rate: float
    committed_per_round: float
    target_busy_share: float
    preemptions: int
    workers_lost: int
    def __init__(self, tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., finished: _Optional[int] = ..., failed: _Optional[int] = ..., refused: _Optional[int] = ..., rounds: _Optional[int] = ..., acceptance_rate: _Optional[float] = ..., committed_per_round: _Optional[float] = ..., target_busy_share: _Optional[float] = ..., preemptions: _Optional[int] = ..., workers_lost: _Optional[int] = ...) -> None: ...

class SpeculationFigures(_message.Message):
    __slots__ = ("drafts", "draft_tokens", "accepted_tokens", "accepted_per_position", "proposals_asked", "proposals_in_time", "proposals_ahead", "hidden_seconds", "sources")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_ASKED_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_IN_TIME_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    proposals_asked: int
    proposals_in_time: int
    proposals_ahead: int
    hidden_seconds: float
    sources: _containers.RepeatedCompositeFieldContainer[SourceFigures]
    def __init__(self, drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., proposals_asked: _Optional[int] = ..., proposals_in_time: _Optional[int] = ..., proposals_ahead: _Optional[int] = ..., hidden_seconds: _Optional[float] = ..., sources: _Optional[_Iterable[_Union[SourceFigures, _Mapping]]] = ...) -> None: ...

class SourceFigures(_message.Message):
    __slots__ = ("source", "draft_tokens", "accepted_tokens")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    source: _worker_pb2.ProposalSource
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, source: _Optional[_Union[_worker_pb2.ProposalSource, str]] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...
