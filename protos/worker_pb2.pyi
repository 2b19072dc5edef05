from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_DRAFT: _ClassVar[Role]
    ROLE_TARGET: _ClassVar[Role]

class RowStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_STATUS_UNSPECIFIED: _ClassVar[RowStatus]
    ROW_STATUS_OK: _ClassVar[RowStatus]
    ROW_STATUS_UNKNOWN_SEQUENCE: _ClassVar[RowStatus]
    ROW_STATUS_KV_MISMATCH: _ClassVar[RowStatus]
    ROW_STATUS_OUT_OF_PAGES: _ClassVar[RowStatus]
    ROW_STATUS_INVALID: _ClassVar[RowStatus]
    ROW_STATUS_FAILED: _ClassVar[RowStatus]
    ROW_STATUS_VOID: _ClassVar[RowStatus]

class ProposalSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROPOSAL_SOURCE_UNSPECIFIED: _ClassVar[ProposalSource]
    PROPOSAL_SOURCE_DRAFT: _ClassVar[ProposalSource]
    PROPOSAL_SOURCE_LOOKUP: _ClassVar[ProposalSource]
    PROPOSAL_SOURCE_EXPECTED: _ClassVar[ProposalSource]

class StepStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_STATUS_UNSPECIFIED: _ClassVar[StepStatus]
    STEP_STATUS_OK: _ClassVar[StepStatus]
    STEP_STATUS_WRONG_EPOCH: _ClassVar[StepStatus]
    STEP_STATUS_FENCED: _ClassVar[StepStatus]
    STEP_STATUS_INVALID: _ClassVar[StepStatus]
ROLE_UNSPECIFIED: Role
ROLE_DRAFT: Role
ROLE_TARGET: Role
ROW_STATUS_UNSPECIFIED: RowStatus
ROW_STATUS_OK: RowStatus
ROW_STATUS_UNKNOWN_SEQUENCE: RowStatus
ROW_STATUS_KV_MISMATCH: RowStatus
ROW_STATUS_OUT_OF_PAGES: RowStatus
ROW_STATUS_INVALID: RowStatus
ROW_STATUS_FAILED: RowStatus
ROW_STATUS_VOID: RowStatus
PROPOSAL_SOURCE_UNSPECIFIED: ProposalSource
PROPOSAL_SOURCE_DRAFT: ProposalSource
PROPOSAL_SOURCE_LOOKUP: ProposalSource
PROPOSAL_SOURCE_EXPECTED: ProposalSource
STEP_STATUS_UNSPECIFIED: StepStatus
STEP_STATUS_OK: StepStatus
STEP_STATUS_WRONG_EPOCH: StepStatus
STEP_STATUS_FENCED: StepStatus
STEP_STATUS_INVALID: StepStatus

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "oldest_protocol_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    oldest_protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ...) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("role", "model_id", "tokenizer_digest", "vocabulary_size", "dtype", "device", "worker_epoch", "page_size", "total_pages", "free_pages", "max_sequence_length", "max_num_batched_tokens", "exact_row_counts", "process_id", "threads", "kv_bytes_per_token", "protocol_version", "oldest_protocol_version", "quantization", "kv_cache_dtype", "fingerprint", "own_draft_id", "page_spans", "page_windows", "version")
    class FingerprintEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    OWN_DRAFT_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SPANS_FIELD_NUMBER: _ClassVar[int]
    PAGE_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    role: Role
    model_id: str
    tokenizer_digest: bytes
    vocabulary_size: int
    dtype: str
    device: str
    worker_epoch: int
    page_size: int
    total_pages: int
    free_pages: int
    max_sequence_length: int
    max_num_batched_tokens: int
    exact_row_counts: _containers.RepeatedScalarFieldContainer[int]
    process_id: int
    threads: int
    kv_bytes_per_token: int
    protocol_version: int
    oldest_protocol_version: int
    quantization: str
    kv_cache_dtype: str
    fingerprint: _containers.ScalarMap[str, str]
    own_draft_id: str
    page_spans: _containers.RepeatedScalarFieldContainer[int]
    page_windows: _containers.RepeatedScalarFieldContainer[int]
    version: str
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., model_id: _Optional[str] = ..., tokenizer_digest: _Optional[bytes] = ..., vocabulary_size: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., worker_epoch: _Optional[int] = ..., page_size: _Optional[int] = ..., total_pages: _Optional[int] = ..., free_pages: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., exact_row_counts: _Optional[_Iterable[int]] = ..., process_id: _Optional[int] = ..., threads: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., protocol_version: _Optional[int] = ..., oldest_protocol_version: _Optional[int] = ..., quantization: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., fingerprint: _Optional[_Mapping[str, str]] = ..., own_draft_id: _Optional[str] = ..., page_spans: _Optional[_Iterable[int]] = ..., page_windows: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("worker_epoch", "step_id", "scheduler_epoch", "released_sequence_ids", "rows", "following", "grant", "wait_seconds")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    step_id: int
    scheduler_epoch: int
    released_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedCompositeFieldContainer[Row]
    following: FollowingRows
    grant: DraftGrant
    wait_seconds: float
    def __init__(self, worker_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., released_sequence_ids: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[_Union[Row, _Mapping]]] = ..., following: _Optional[_Union[FollowingRows, _Mapping]] = ..., grant: _Optional[_Union[DraftGrant, _Mapping]] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class DraftGrant(_message.Message):
    __slots__ = ("address", "draft_epoch", "scheduler_epoch", "number", "target_id")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    address: str
    draft_epoch: int
    scheduler_epoch: int
    number: int
    target_id: str
    def __init__(self, address: _Optional[str] = ..., draft_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., number: _Optional[int] = ..., target_id: _Optional[str] = ...) -> None: ...

class Row(_message.Message):
    __slots__ = ("sequence_id", "kv_len", "prefix_digest", "tokens", "verify", "draft_length", "sample", "parameters", "scoring", "known_tokens", "lookup_length")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SCORING_FIELD_NUMBER: _ClassVar[int]
    KNOWN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    kv_len: int
    prefix_digest: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    verify: int
    draft_length: int
    sample: bool
    parameters: SequenceParameters
    scoring: PromptScoring
    known_tokens: int
    lookup_length: int
    def __init__(self, sequence_id: _Optional[int] = ..., kv_len: _Optional[int] = ..., prefix_digest: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., verify: _Optional[int] = ..., draft_length: _Optional[int] = ..., sample: _Optional[bool] = ..., parameters: _Optional[_Union[SequenceParameters, _Mapping]] = ..., scoring: _Optional[_Union[PromptScoring, _Mapping]] = ..., known_tokens: _Optional[int] = ..., lookup_length: _Optional[int] = ...) -> None: ...

class FollowingRows(_message.Message):
    __slots__ = ("sequence_ids", "kv_lens", "prefix_digests", "draft_lengths", "verify", "lookup_lengths")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_digests: _containers.RepeatedScalarFieldContainer[int]
    draft_lengths: _containers.RepeatedScalarFieldContainer[int]
    verify: _containers.RepeatedScalarFieldContainer[int]
    lookup_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., kv_lens: _Optional[_Iterable[int]] = ..., prefix_digests: _Optional[_Iterable[int]] = ..., draft_lengths: _Optional[_Iterable[int]] = ..., verify: _Optional[_Iterable[int]] = ..., lookup_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptScoring(_message.Message):
    __slots__ = ("first", "tokens", "top")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    first: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    top: int
    def __init__(self, first: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ...) -> None: ...

class SequenceParameters(_message.Message):
    __slots__ = ("prompt_length", "sampling", "logits_digests", "top_logprobs", "committed_tokens", "cache_scope", "expected_output")
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    prompt_length: int
    sampling: SamplingParameters
    logits_digests: bool
    top_logprobs: int
    committed_tokens: _containers.RepeatedScalarFieldContainer[int]
    cache_scope: bytes
    expected_output: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., logits_digests: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., committed_tokens: _Optional[_Iterable[int]] = ..., cache_scope: _Optional[bytes] = ..., expected_output: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "min_tokens", "end_token_ids", "grammar", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    min_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: Grammar
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., min_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("definition", "end_token_ids")
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    definition: str
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, definition: _Optional[str] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RowAnswers(_message.Message):
    __slots__ = ("statuses", "counts", "tokens", "kv_lens", "prefix_digests", "verified", "logits_digests", "reused", "details", "sources")
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_LENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    LOGITS_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[RowStatus]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_lens: _containers.RepeatedScalarFieldContainer[int]
    prefix_digests: _containers.RepeatedScalarFieldContainer[int]
    verified: _containers.RepeatedScalarFieldContainer[int]
    logits_digests: _containers.RepeatedScalarFieldContainer[int]
    reused: _containers.RepeatedScalarFieldContainer[int]
    details: _containers.RepeatedCompositeFieldContainer[RowDetails]
    sources: _containers.RepeatedScalarFieldContainer[ProposalSource]
    def __init__(self, statuses: _Optional[_Iterable[_Union[RowStatus, str]]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., kv_lens: _Optional[_Iterable[int]] = ..., prefix_digests: _Optional[_Iterable[int]] = ..., verified: _Optional[_Iterable[int]] = ..., logits_digests: _Optional[_Iterable[int]] = ..., reused: _Optional[_Iterable[int]] = ..., details: _Optional[_Iterable[_Union[RowDetails, _Mapping]]] = ..., sources: _Optional[_Iterable[_Union[ProposalSource, str]]] = ...) -> None: ...

class RowDetails(_message.Message):
    __slots__ = ("row", "error", "logprobs", "prompt_logprobs")
    ROW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    row: int
    error: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, row: _Optional[int] = ..., error: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_id", "logprob", "top_token_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("worker_epoch", "step_id", "status", "rows", "timings", "free_pages", "error", "drafting")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    step_id: int
    status: StepStatus
    rows: RowAnswers
    timings: StepTimings
    free_pages: int
    error: str
    drafting: DraftingReport
    def __init__(self, worker_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., status: _Optional[_Union[StepStatus, str]] = ..., rows: _Optional[_Union[RowAnswers, _Mapping]] = ..., timings: _Optional[_Union[StepTimings, _Mapping]] = ..., free_pages: _Optional[int] = ..., error: _Optional[str] = ..., drafting: _Optional[_Union[DraftingReport, _Mapping]] = ...) -> None: ...

class DraftingReport(_message.Message):
    __slots__ = ("connected", "asked", "in_time", "ahead", "hidden_seconds", "refused_ids")
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_IDS_FIELD_NUMBER: _ClassVar[int]
    connected: bool
    asked: int
    in_time: int
    ahead: int
    hidden_seconds: float
    refused_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, connected: _Optional[bool] = ..., asked: _Optional[int] = ..., in_time: _Optional[int] = ..., ahead: _Optional[int] = ..., hidden_seconds: _Optional[float] = ..., refused_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queued", "idle", "prepare", "realign", "forward", "sample", "total", "packed_rows", "padding_rows", "drafting")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    REALIGN_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    PACKED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PADDING_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    queued: float
    idle: float
    prepare: float
    realign: float
    forward: float
    sample: float
    total: float
    packed_rows: int
    padding_rows: int
    drafting: float
    def __init__(self, queued: _Optional[float] = ..., idle: _Optional[float] = ..., prepare: _Optional[float] = ..., realign: _Optional[float] = ..., forward: _Optional[float] = ..., sample: _Optional[float] = ..., total: _Optional[float] = ..., packed_rows: _Optional[int] = ..., padding_rows: _Optional[int] = ..., drafting: _Optional[float] = ...) -> None: ...

class ExportKvRequest(_message.Message):
    __slots__ = ("worker_epoch", "scheduler_epoch", "sequence_id", "kv_len", "prefix_digest")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_DIGEST_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    scheduler_epoch: int
    sequence_id: int
    kv_len: int
    prefix_digest: int
    def __init__(self, worker_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., sequence_id: _Optional[int] = ..., kv_len: _Optional[int] = ..., prefix_digest: _Optional[int] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("header", "page")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    header: KvHeader
    page: KvPage
    def __init__(self, header: _Optional[_Union[KvHeader, _Mapping]] = ..., page: _Optional[_Union[KvPage, _Mapping]] = ...) -> None: ...

class KvHeader(_message.Message):
    __slots__ = ("model_id", "dtype", "page_shape", "pages", "compute_digest", "tensor_parallel_size")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    dtype: str
    page_shape: _containers.RepeatedScalarFieldContainer[int]
    pages: int
    compute_digest: bytes
    tensor_parallel_size: int
    def __init__(self, model_id: _Optional[str] = ..., dtype: _Optional[str] = ..., page_shape: _Optional[_Iterable[int]] = ..., pages: _Optional[int] = ..., compute_digest: _Optional[bytes] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class KvPage(_message.Message):
    __slots__ = ("index", "data", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    checksum: int
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ImportKvRequest(_message.Message):
    __slots__ = ("worker_epoch", "scheduler_epoch", "sequence_id", "tokens", "parameters", "source_address", "source_worker_epoch", "source_scheduler_epoch")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SCHEDULER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    scheduler_epoch: int
    sequence_id: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parameters: SequenceParameters
    source_address: str
    source_worker_epoch: int
    source_scheduler_epoch: int
    def __init__(self, worker_epoch: _Optional[int] = ..., scheduler_epoch: _Optional[int] = ..., sequence_id: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parameters: _Optional[_Union[SequenceParameters, _Mapping]] = ..., source_address: _Optional[str] = ..., source_worker_epoch: _Optional[int] = ..., source_scheduler_epoch: _Optional[int] = ...) -> None: ...

class ImportKvReply(_message.Message):
    __slots__ = ("bytes", "seconds")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
