"""A text that streams over gRPC. Needs grpcio and the stubs of this package."""

import os

import grpc

from spool_client.v1 import generation_pb2, generation_pb2_grpc

channel = grpc.insecure_channel(os.environ.get("SPOOL_GRPC", "127.0.0.1:8001"))
stub = generation_pb2_grpc.GenerationServiceStub(channel)
request = generation_pb2.GenerateRequest(text="The three laws of robotics are", max_tokens=60, temperature=0)
metadata = [("authorization", f"Bearer {os.environ['SPOOL_API_KEY']}")] if "SPOOL_API_KEY" in os.environ else []
try:
    for message in stub.GenerateStream(request, timeout=120, metadata=metadata):
        print(message.choice.text, end="", flush=True)
        if message.HasField("usage"):
            usage = message.usage
            accepted = f"{usage.accepted_tokens} of {usage.drafted_tokens}"
            print(f"\n{usage.completion_tokens} tokens; accepted {accepted} drafted ones")
except grpc.RpcError as error:
    # INVALID_ARGUMENT names field, value and limit; RESOURCE_EXHAUSTED comes with `retry-after`.
    raise SystemExit(f"{error.code().name}: {error.details()}") from error
