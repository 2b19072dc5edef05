"""Families of transformers by how they are served (docs/models.md). No torch here.

Any other is refused. tests/engine/test_families.py compares tiny models of all of them with `model.generate`.
"""

from spool.engine.layers.families import FAMILIES

_PAGED = """
    afmoe apertus bert bert-generation biogpt bitnet camembert cohere2_moe ctrl data2vec-text electra ernie exaone_moe
    fuyu gpt-sw3 gpt2 granitemoe_swa granitemoeshared hy_v3 laguna mellum minimax_m3_vl_text ministral3
    modernbert-decoder opt roberta roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl
"""
_SOLO = """
    aria_text axk1 axk2 bamba bart bigbird_pegasus blenderbot blenderbot-small bloom codegen deepseek_v2 deepseek_v3
    deepseek_v32 diffllama falcon falcon_h1 falcon_mamba gemma3n_text glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neo
    gpt_neox_japanese gptj granitemoehybrid hrm_text hy_v4 jamba jetmoe kimi_linear lfm2 lfm2_moe llama4_text
    longcat_flash mamba mamba2 marian mbart mimo_v2_flash minicpm3 mpt mvp nemotron olmo_hybrid pegasus plbart
    qwen3_5_moe_text qwen3_5_text qwen3_next stablelm trocr whisper xglm xmod youtu zamba zamba2 zaya
"""
_SPARSE = """
    dots1 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe hunyuan_v1_moe minimax_m2 mixtral olmoe phimoe qwen2_moe
    qwen3_moe solar_open
"""

SPARSE_FAMILIES = frozenset(_SPARSE.split())
"""Those with experts, which are expanded, of the families whose layers are described (engine/layers/families.py)."""

DENSE_FAMILIES = frozenset(FAMILIES) - SPARSE_FAMILIES
"""The described ones without experts: fast, and with weights that stay quantised as a checkpoint has them."""

PAGED_FAMILIES = frozenset(FAMILIES).union(_PAGED.split())
"""Model types that compute on paged KV: the described ones, and some that run transformers' own layers."""

SOLO_FAMILIES = frozenset(_SOLO.split())
"""Model types whose sequences are computed one at a time (engine/passes/solo.py): their attention does not go through
transformers' interface, or their layers keep something else than one key and one value of each position."""
