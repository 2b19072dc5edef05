"""A load from Locust (`pip install locust`), with its page or without:

    locust -f docs/examples/locustfile.py --host http://127.0.0.1:8000 --headless --users 16 --run-time 30s

Refusals (429) are what a full queue answers, and are counted by themselves.
"""

import os
import random
import time

from locust import HttpUser, task

QUESTIONS = ("Why is the sky blue?", "Write a haiku about rain.", "What is 17 times 23?", "Name three rivers.")


class Reader(HttpUser):
    def on_start(self):
        self.client.headers["authorization"] = f"Bearer {os.environ.get('SPOOL_API_KEY', 'none')}"
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]

    @task
    def read(self):
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": random.choice(QUESTIONS)}],
            "max_tokens": 48,
            "stream": True,
        }
        began = time.perf_counter()
        with self.client.post("/v1/chat/completions", json=body, stream=True, catch_response=True) as response:
            if response.status_code == 429:
                response.success()
                self.note("refused", began)
                return
            first = None
            for line in response.iter_lines():
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter()
                    self.note("first token", began)

    def note(self, name, began):
        self.environment.events.request.fire(
            request_type="spool",
            name=name,
            response_time=1000 * (time.perf_counter() - began),
            response_length=0,
            exception=None,
            context={},
        )
