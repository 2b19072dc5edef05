"""A streamed chat through OpenAI's package (`pip install openai`), and what speculation did for it."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SPOOL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SPOOL_API_KEY", "none"),
)

stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
    max_tokens=80,
    temperature=0.7,
    seed=1,  # the same seed gives the same text, whatever else the server does
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:
        speculation = chunk.usage.model_extra["spool"]
        print(f"\n{chunk.usage.completion_tokens} tokens; of drafted ones accepted: {speculation}")
