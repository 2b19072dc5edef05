"""Families of transformers by how they are served (docs/models.md). No torch here.

Any other is refused. tests/engine/test_families.py compares tiny models of all of them with `model.generate`.
"""

_PAGED = """
    afmoe apertus arcee bert bert-generation biogpt bitnet camembert cohere cohere2 cohere2_moe ctrl cwm
    data2vec-text dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma2
    gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax jais2 laguna llama mellum minimax_m2
    minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3
    solar_open starcoder2 vaultgemma xlm-roberta xlm-roberta-xl
"""
_SOLO = """
    aria_text axk1 axk2 bamba bart bigbird_pegasus blenderbot blenderbot-small bloom codegen deepseek_v2 deepseek_v3
    deepseek_v32 diffllama falcon falcon_h1 falcon_mamba gemma3n_text glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neo
    gpt_neox_japanese gptj granitemoehybrid hrm_text hy_v4 jamba jetmoe kimi_linear lfm2 lfm2_moe llama4_text
    longcat_flash mamba mamba2 marian mbart mimo_v2_flash minicpm3 mpt mvp nemotron olmo_hybrid pegasus plbart
    qwen3_5_moe_text qwen3_5_text qwen3_next stablelm trocr whisper xglm xmod youtu zamba zamba2 zaya
"""

_DENSE = """
    arcee cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt_neox granite granite_swa helium
    hunyuan_v1_dense hyperclovax jais2 llama ministral mistral nanochat olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen3
    seed_oss smollm3 starcoder2 vaultgemma
"""
_SPARSE = """
    dots1 ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe hunyuan_v1_moe minimax_m2 mixtral olmoe phimoe qwen2_moe
    qwen3_moe solar_open
"""

DENSE_FAMILIES = frozenset(_DENSE.split())
"""Of the paged ones, those whose layers are described (engine/layers/families.py), without experts: fast, and with
weights that stay quantised as a checkpoint has them."""

SPARSE_FAMILIES = frozenset(_SPARSE.split())
"""The described ones with experts, which are expanded."""

PAGED_FAMILIES = frozenset(_PAGED.split())
"""Model types that compute on paged KV."""

SOLO_FAMILIES = frozenset(_SOLO.split())
"""Model types whose sequences are computed one at a time (engine/passes/solo.py): their attention does not go through
transformers' interface, or their layers keep something else than one key and one value of each position."""
