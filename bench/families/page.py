"""docs/models.md, from the result of `python -m bench.families`. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

_BEGINNING = """\
# Models

Spool serves decoder-only models of transformers in which every layer attends to all earlier positions, on one GPU
for each replica; targets of the families Llama, Qwen2, Qwen3 and Qwen3-MoE also on
[several](serving.md#a-target-over-several-ranks). Draft and target need the same tokenizer.

`python -m bench.families` tried {tried} families of transformers {version}: a tiny random model of each, in float32 on
a CPU, served with drafts in a batch, and compared with `model.generate`. This page is made from its result.

- **exact**: the output is that of `model.generate`, and the bits of the logits do not depend on the batch.
- **runs**: the output is that of `model.generate`. Exact mode finds no shapes, because each expert computes at once all
  rows that are routed to it, and that number varies. Such a model starts only with `exact: false`. On a GPU, Qwen3-MoE
  would belong here too; on a CPU it is exact, because its experts have kernels of their own there.
- **refused**: a worker says why when it starts, and does not serve the model.

A model of a family that is neither *exact* nor *runs* is compared with itself when it is loaded: the logits of a few
tokens on paged KV with those of passes through its own attention. It is refused if the logits differ.

In a tiny model of an exact family, every layer has full attention. A published model of the same family is refused
where its configuration says otherwise: those of `lfm2` have convolutions, the first Mistral 7B has sliding windows, and
Phi-3 models for long contexts have rotary positions of the type `longrope`.

Also refused, whatever the family: sliding windows, rotary positions of the types `dynamic` and `longrope`, quantised
weights, and models that bring code of their own (`trust_remote_code`). Llama, Qwen2 and Qwen3 have fused layers, and
Qwen3-MoE has joined ones; the others compute their layers with transformers' own code, which is slower.
"""


def page(kept: Mapping[str, Any]) -> str:
    """Of the JSON that `bench.record` kept."""
    found = kept["result"]
    rows = found["families"]
    tried = [row for row in rows if row["verdict"] != "untried"]
    return "\n".join([_BEGINNING.format(tried=len(tried), version=found["transformers"]), *_lines(rows)]) + "\n"


def _lines(rows: list[Mapping[str, str]]) -> Iterator[str]:
    for verdict in ("exact", "runs"):
        names = [row["family"] for row in rows if row["verdict"] == verdict]
        yield f"**{verdict}** ({len(names)}): {', '.join(f'`{name}`' for name in names)}\n"
    refused = [row for row in rows if row["verdict"] == "refused"]
    yield f"**refused** ({len(refused)}):\n"
    yield "| family | reason |"
    yield "| --- | --- |"
    for row in refused:
        yield f"| `{row['family']}` | {shorten(row['reason'], 160, placeholder=' ...').replace('|', '/')} |"
    untried = [f"`{row['family']}`" for row in rows if row["verdict"] == "untried"]
    yield f"\n**Not tried** ({len(untried)}), as no small model could be made: {', '.join(untried)}"
