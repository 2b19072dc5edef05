"""Compiles the kernels that choose tokens, for GPUs that need not be there. What they choose is tested elsewhere
(tests/unit/engine/test_triton_sampling.py)."""

from __future__ import annotations

import torch

from engine.cuda.triton_sampling import TritonScan
from tests.support.triton_builds import launched, resources

_VOCABULARY = 151_936


def builds(
    architecture: int, dtype: torch.dtype, temperature: float, has_token_ids: bool
) -> dict[str, tuple[int, int]]:
    """Of each kernel that is launched: the bytes of a thread's stack, and how many of its operations on float64
    multiply and add in one."""
    logits = torch.zeros(2, _VOCABULARY, dtype=dtype)
    token_ids = torch.arange(_VOCABULARY) if has_token_ids else None
    kernels = launched(lambda: TritonScan().choose(logits, [(1, temperature)] * 2, token_ids), architecture)
    return {
        kernel.metadata.name: (resources(kernel.asm["cubin"])[1], kernel.asm["ptx"].count("fma.rn.f64"))
        for kernel in kernels
    }
