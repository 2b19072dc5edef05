from spool.protos import scheduler_pb2 as _scheduler_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SequenceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_STATE_UNSPECIFIED: _ClassVar[SequenceState]
    SEQUENCE_STATE_WAITING: _ClassVar[SequenceState]
    SEQUENCE_STATE_PREFILLING: _ClassVar[SequenceState]
    SEQUENCE_STATE_IDLE: _ClassVar[SequenceState]
    SEQUENCE_STATE_VERIFYING: _ClassVar[SequenceState]
    SEQUENCE_STATE_MOVING: _ClassVar[SequenceState]
SEQUENCE_STATE_UNSPECIFIED: SequenceState
SEQUENCE_STATE_WAITING: SequenceState
SEQUENCE_STATE_PREFILLING: SequenceState
SEQUENCE_STATE_IDLE: SequenceState
SEQUENCE_STATE_VERIFYING: SequenceState
SEQUENCE_STATE_MOVING: SequenceState

class WatchRequest(_message.Message):
    __slots__ = ("period_seconds", "max_sequences")
    PERIOD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    period_seconds: float
    max_sequences: int
    def __init__(self, period_seconds: _Optional[float] = ..., max_sequences: _Optional[int] = ...) -> None: ...

class CellView(_message.Message):
    __slots__ = ("now", "sequences", "unlisted_sequences", "steps", "status")
    NOW_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UNLISTED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    now: float
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceView]
    unlisted_sequences: int
    steps: _containers.RepeatedCompositeFieldContainer[StepView]
    status: _scheduler_pb2.StatusReply
    def __init__(self, now: _Optional[float] = ..., sequences: _Optional[_Iterable[_Union[SequenceView, _Mapping]]] = ..., unlisted_sequences: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepView, _Mapping]]] = ..., status: _Optional[_Union[_scheduler_pb2.StatusReply, _Mapping]] = ...) -> None: ...

class SequenceView(_message.Message):
    __slots__ = ("sequence_id", "length", "prompt_length", "state", "target_id")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TARGET_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    length: int
    prompt_length: int
    state: SequenceState
    target_id: str
    def __init__(self, sequence_id: _Optional[int] = ..., length: _Optional[int] = ..., prompt_length: _Optional[int] = ..., state: _Optional[_Union[SequenceState, str]] = ..., target_id: _Optional[str] = ...) -> None: ...

class StepView(_message.Message):
    __slots__ = ("worker_id", "started", "ended", "rows", "draft_length", "equal_length")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EQUAL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    started: float
    ended: float
    rows: int
    draft_length: int
    equal_length: bool
    def __init__(self, worker_id: _Optional[str] = ..., started: _Optional[float] = ..., ended: _Optional[float] = ..., rows: _Optional[int] = ..., draft_length: _Optional[int] = ..., equal_length: _Optional[bool] = ...) -> None: ...
