"""Answers a file of prompts with many requests at once, and tries again where the server has no room.

    python docs/examples/batch_file.py questions.jsonl answers.jsonl

One JSON object with `prompt` a line comes in, one with `prompt` and `answer` goes out, in the same order.
"""

import asyncio
import json
import os
import sys

from openai import AsyncOpenAI

AT_ONCE = 32


async def ask(prompts: list[str]) -> list[str]:
    # The package itself waits and tries again when it gets 429 or 503.
    client = AsyncOpenAI(
        base_url=os.environ.get("SPOOL_URL", "http://127.0.0.1:8000") + "/v1",
        api_key=os.environ.get("SPOOL_API_KEY", "none"),
        max_retries=8,
    )
    model = (await client.models.list()).data[0].id
    room = asyncio.Semaphore(AT_ONCE)

    async def answer(prompt: str, seed: int) -> str:
        async with room:
            done = await client.completions.create(model=model, prompt=prompt, max_tokens=64, temperature=0, seed=seed)
            return done.choices[0].text

    return await asyncio.gather(*(answer(prompt, seed) for seed, prompt in enumerate(prompts)))


questions, answers = sys.argv[1:]
with open(questions, encoding="utf-8") as lines:
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
texts = asyncio.run(ask(prompts))
with open(answers, "w", encoding="utf-8") as out:
    for prompt, text in zip(prompts, texts, strict=True):
        out.write(json.dumps({"prompt": prompt, "answer": text}) + "\n")
print(f"{len(texts)} answers in {answers}")
