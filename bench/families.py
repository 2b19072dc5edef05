"""How fast families of models are on this machine beside Llama, with random weights of one shape: steps of each in
turns with Llama's, or with Qwen3-MoE's for those with experts. In JSON: times of a step in milliseconds, and speeds
beside the other one.

    python -m bench.families mistral gemma3_text mixtral
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch
from rich.progress import track
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bench.step_times import PAGES, step_times
from spool.engine.attention.paged_step import ATTENTION_NAME
from spool.engine.cpu.isa import AUTO, CPU_ISAS
from spool.engine.models.families import DENSE_FAMILIES, SPARSE_FAMILIES
from spool.engine.models.loading import target_engine_of
from spool.engine.settings import EngineSettings
from spool.engine.target import TargetEngine

_SHAPE = {
    **{"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048},
}
_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size", "shared_expert_intermediate_size"), 384),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="+", choices=sorted(DENSE_FAMILIES | SPARSE_FAMILIES), metavar="FAMILY")
    parser.add_argument("--cpu-isa", choices=CPU_ISAS, default=AUTO)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    settings = EngineSettings("random", cpu_isa=options.cpu_isa, threads=options.threads, kv_pages=PAGES)
    print(json.dumps({family: _beside_another(family, settings, options.turns) for family in options.families}))


def _beside_another(family: str, settings: EngineSettings, turns: int) -> dict[str, Any]:
    other = "qwen3_moe" if family in SPARSE_FAMILIES else "llama"
    engines = {"this": _engine(family, settings), "other": _engine(other, settings)}
    times = [{which: step_times(engine) for which, engine in engines.items()} for _ in track(range(turns), family)]
    found: dict[str, Any] = {"beside": other}
    for name in times[0]["this"]:
        ratios = sorted(turn["other"][name] / turn["this"][name] for turn in times)
        milliseconds = {which: 1000 * median(turn[which][name] for turn in times) for which in engines}
        found[name] = {"speed": median(ratios), "from": ratios[0], "to": ratios[-1], "milliseconds": milliseconds}
    return found


def _engine(family: str, settings: EngineSettings) -> TargetEngine:
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[family]
    default = kind()
    shape = _SHAPE | (_EXPERTS if family in SPARSE_FAMILIES else {})
    sizes = {name: size for name, size in shape.items() if isinstance(getattr(default, name, None), int)}
    if family == "ministral":
        sizes["head_dim"] = _SHAPE["head_dim"]  # its default is no number
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = kind(**sizes, **tokens, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME)
    return target_engine_of(model, settings, lambda *_: None)


if __name__ == "__main__":
    main()
