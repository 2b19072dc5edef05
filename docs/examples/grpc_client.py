"""A text that streams over gRPC. Needs spool-client, which Spool requires."""

import os

import grpc

from spool.client import Client, GenerateRequest

request = GenerateRequest(text="The three laws of robotics are", max_tokens=60, temperature=0)
with Client(os.environ.get("SPOOL_GRPC", "127.0.0.1:8001"), api_key=os.environ.get("SPOOL_API_KEY")) as client:
    try:
        for part in client.stream(request, timeout=120):
            print(part.choice.text, end="", flush=True)
            if part.HasField("usage"):
                usage = part.usage
                accepted = f"{usage.accepted_tokens} of {usage.drafted_tokens}"
                print(f"\n{usage.completion_tokens} tokens; accepted {accepted} drafted ones")
    except grpc.RpcError as error:
        # INVALID_ARGUMENT names field, value and limit.
        raise SystemExit(f"{error.code().name}: {error.details()}") from error
