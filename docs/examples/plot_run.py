"""Watches /metrics and /load of a gateway, and draws speed, sequences and accepted drafts (`pip install matplotlib`).

python docs/examples/plot_run.py run.png --seconds 60
"""

import argparse
import itertools
import json
import os
import time
import urllib.request

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from prometheus_client.parser import text_string_to_metric_families

TOKENS, RUNNING = "spool_generation_tokens_total", "running"
DRAFTED, ACCEPTED = "spool_delivered_draft_tokens_total", "spool_delivered_accepted_tokens_total"


def get(url: str) -> str:
    request = urllib.request.Request(url)
    request.add_header("authorization", f"Bearer {os.environ.get('SPOOL_API_KEY', 'none')}")
    with urllib.request.urlopen(request, timeout=10) as response:
        text: str = response.read().decode()
    return text


def read(url: str) -> dict[str, float]:
    """Sums over labels, and the sequences that are running."""
    sums: dict[str, float] = {RUNNING: json.loads(get(f"{url}/load"))[RUNNING]}
    for family in text_string_to_metric_families(get(f"{url}/metrics")):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


parser = argparse.ArgumentParser()
parser.add_argument("picture")
parser.add_argument("--url", default=os.environ.get("SPOOL_URL", "http://127.0.0.1:8000"))
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--every", type=float, default=1)
asked = parser.parse_args()

began = time.monotonic()
times, readings = [0.0], [read(asked.url)]
while times[-1] < asked.seconds:
    time.sleep(asked.every)
    readings.append(read(asked.url))
    times.append(time.monotonic() - began)
    print(f"{times[-1]:.0f} s, {readings[-1][TOKENS]:.0f} tokens", end="\r", flush=True)

steps = list(itertools.pairwise(readings))
lengths = [after - before for before, after in itertools.pairwise(times)]
rates = [(after[TOKENS] - before[TOKENS]) / length for (before, after), length in zip(steps, lengths, strict=True)]
shares = [(after[ACCEPTED] - before[ACCEPTED]) / max(after[DRAFTED] - before[DRAFTED], 1) for before, after in steps]
figure, axes = plt.subplots(3, 1, sharex=True, figsize=(8, 7), layout="constrained")
for axis, values, label in (
    (axes[0], rates, "output tokens a second"),
    (axes[1], [reading[RUNNING] for reading in readings[1:]], "sequences running"),
    (axes[2], shares, "drafted tokens accepted"),
):
    axis.plot(times[1:], values)
    axis.set_ylabel(label)
    axis.set_ylim(bottom=0)
axes[2].set_xlabel("seconds")
figure.savefig(asked.picture)
print(f"\n{asked.picture}")
