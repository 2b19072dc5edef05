"""Rollouts for reinforcement learning, and their log probabilities again: from a replay, and with each as a prompt.

    python docs/examples/rollout.py MODEL

MODEL is what the server serves, as a folder or hub id; the replay computes on this machine.
"""

import json
import os
import subprocess
import sys

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("SPOOL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("SPOOL_API_KEY", "none"),
)
model = client.models.list().data[0].id
more = {"receipt": True, "return_token_ids": True}
answer = client.completions.create(
    model=model, prompt="The sea", n=4, max_tokens=48, temperature=1, logprobs=0, extra_body=more
)
with open("answers.jsonl", "w", encoding="utf-8") as lines:
    lines.write(answer.model_dump_json() + "\n")

replay = ["spool", "replay", "answers.jsonl", "--target", sys.argv[1], "--logprobs", "--json"]
done = subprocess.run(replay, check=True, stdout=subprocess.PIPE, text=True)
replayed = json.loads(done.stdout.splitlines()[-1])["receipts"]

for choice, again in zip(answer.choices, replayed, strict=True):
    tokens = [*choice.model_extra["prompt_token_ids"], *choice.model_extra["token_ids"]]
    scored = client.completions.create(model=model, prompt=tokens, max_tokens=0, extra_body={"prompt_logprobs": 0})
    known = scored.choices[0].model_extra["prompt_logprobs"][-len(choice.model_extra["token_ids"]) :]
    as_prompt = [entry["logprob"] for place in known for entry in place.values()]
    # Not nearly equal: the same bits.
    equal = choice.logprobs.token_logprobs == again["logprobs"] == as_prompt
    print(f"{len(as_prompt)} log probabilities, {'all equal' if equal else 'not equal'}")
