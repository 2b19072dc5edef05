"""A machine with torch and transformers alone runs the engine: what else Spool installs is blocked in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

ABSENT = (
    *("platformdirs", "llguidance", "google.protobuf", "pydantic", "grpc", "ray", "fastapi", "uvicorn"),
    *("prometheus_client", "opentelemetry", "openai", "accelerate", "gguf", "jinja2", "click", "rich"),
)

PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT}))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import engine.drafting.ngram_engine, engine.kv.kv_store, engine.kv.prefix_cache, engine.models.reference
import scheduler.core
from engine.attention.paged_step import ATTENTION_NAME
from engine.kv.pages import PageTable
from engine.models.loading import draft_engine_of, target_engine_of
from engine.settings import EngineSettings
from engine.steps import ProposeRow, VerifyRow
from scheduler.sampling import SamplingParameters

config = LlamaConfig(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, eos_token_id=None,
)

def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)

settings = EngineSettings("tiny", kv_pages=8, max_num_batched_tokens=16)
draft = draft_engine_of(model(), settings, lambda *_: None)
target = target_engine_of(model(), settings, lambda *_: None)
tokens, greedy = [3, 1, 4], SamplingParameters()
proposed = draft.step([ProposeRow(PageTable(), tokens, 4, tokens, len(tokens), greedy)]).rows[0].tokens
print(target.step([VerifyRow(PageTable(), tokens, proposed, True, tokens, len(tokens), greedy)]).rows[0].accepted)
"""


def test_tokens_are_drafted_and_verified_with_torch_and_transformers_alone() -> None:
    environment = {**os.environ, "CC": "no-compiler-either"}
    command = [sys.executable, "-c", PROGRAM]
    outcome = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.strip() == "4"
