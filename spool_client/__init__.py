"""Spool's gRPC API for clients. Needs grpcio and protobuf, nothing else.

from spool_client import Client, GenerateRequest

with Client("127.0.0.1:8001") as client:
    for part in client.stream(GenerateRequest(text="The capital of France is", max_tokens=8)):
        print(part.choice.text, end="")
"""

from spool.client.async_client import AsyncClient
from spool.client.client import Client
from spool.client.received import IncompleteOutputError, OutputChangedError
from spool.client.retry import RetryPolicy
from spool.client.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    Chat,
    ChatMessage,
    Choices,
    DetokenizeRequest,
    DetokenizeResponse,
    FinishReason,
    GeneratedChoice,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamResponse,
    GenerationUsage,
    ListModelsRequest,
    ListModelsResponse,
    Logprob,
    ModelDescription,
    OutputTokenLogprobs,
    ReplayRequest,
    ReplayResponse,
    StructuredOutputs,
    TokenIds,
    TokenizeRequest,
    TokenizeResponse,
)

__all__ = [
    "FINISH_REASON_LENGTH",
    "FINISH_REASON_STOP",
    "FINISH_REASON_UNSPECIFIED",
    "AsyncClient",
    "Chat",
    "ChatMessage",
    "Choices",
    "Client",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "FinishReason",
    "GenerateRequest",
    "GenerateResponse",
    "GenerateStreamResponse",
    "GeneratedChoice",
    "GenerationUsage",
    "IncompleteOutputError",
    "ListModelsRequest",
    "ListModelsResponse",
    "Logprob",
    "ModelDescription",
    "OutputChangedError",
    "OutputTokenLogprobs",
    "ReplayRequest",
    "ReplayResponse",
    "RetryPolicy",
    "StructuredOutputs",
    "TokenIds",
    "TokenizeRequest",
    "TokenizeResponse",
]
