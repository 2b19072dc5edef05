from spool.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("opening", "sequences", "closed_ids", "sequence_ids", "lengths", "digests", "counts", "tokens", "draft_lengths", "step_seconds")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_IDS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    opening: DraftOpening
    sequences: _containers.RepeatedCompositeFieldContainer[DraftSequence]
    closed_ids: _containers.RepeatedScalarFieldContainer[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    draft_lengths: _containers.RepeatedScalarFieldContainer[int]
    step_seconds: float
    def __init__(self, opening: _Optional[_Union[DraftOpening, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[DraftSequence, _Mapping]]] = ..., closed_ids: _Optional[_Iterable[int]] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., draft_lengths: _Optional[_Iterable[int]] = ..., step_seconds: _Optional[float] = ...) -> None: ...

class DraftOpening(_message.Message):
    __slots__ = ("protocol_version", "grant", "oldest_protocol_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    OLDEST_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    grant: _worker_pb2.DraftGrant
    oldest_protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., grant: _Optional[_Union[_worker_pb2.DraftGrant, _Mapping]] = ..., oldest_protocol_version: _Optional[int] = ...) -> None: ...

class DraftSequence(_message.Message):
    __slots__ = ("sequence_id", "parameters")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    parameters: _worker_pb2.SequenceParameters
    def __init__(self, sequence_id: _Optional[int] = ..., parameters: _Optional[_Union[_worker_pb2.SequenceParameters, _Mapping]] = ...) -> None: ...

class Proposals(_message.Message):
    __slots__ = ("sequence_ids", "digests", "counts", "tokens", "unknown_ids", "refused_ids", "ahead", "goes_on")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_IDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_IDS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    unknown_ids: _containers.RepeatedScalarFieldContainer[int]
    refused_ids: _containers.RepeatedScalarFieldContainer[int]
    ahead: bool
    goes_on: bool
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., unknown_ids: _Optional[_Iterable[int]] = ..., refused_ids: _Optional[_Iterable[int]] = ..., ahead: _Optional[bool] = ..., goes_on: _Optional[bool] = ...) -> None: ...
