"""Sparse layers of transformers' experts interface, and routers whose products other layers compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name everybody knows)
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from spool.engine.layers.describing import ACTIVATIONS
from spool.engine.layers.description import Activation
from spool.engine.layers.linear import apart, linear_of


@dataclass(frozen=True, slots=True)
class Experts:
    """Those of a sparse layer: weights `[experts, out, in]`, biases `[experts, out]`, and `gate`, which makes
    `[rows, inner]` of the outputs of `gate_up`. With `has_silu` that is silu of their first half times their second."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Callable[[torch.Tensor], torch.Tensor]
    has_silu: bool

    @classmethod
    def of(cls, module: nn.Module) -> Experts:
        """Of one that transformers' `use_experts_implementation` has decorated."""
        gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if module.is_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        gate_up_bias = module.gate_up_proj_bias.detach() if module.has_bias else None
        down_bias = module.down_proj_bias.detach() if module.has_bias else None
        # The gate is to keep no weights alive.
        gating = copy.copy(module)
        gating._parameters = {}
        has_silu = type(module)._apply_gate.__name__ == "_default_apply_gate"
        has_silu = has_silu and ACTIVATIONS.get(type(module.act_fn)) is Activation.SILU
        return cls(gate_up, down, gate_up_bias, down_bias, gating._apply_gate, has_silu)


def sparse_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Modules that route rows to `experts` of transformers' interface."""
    return [module for module in model.modules() if getattr(getattr(module, "experts", None), "has_gate", False)]


def replace_in_block(block: nn.Module, experts: nn.Module, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces the experts and the router. `make_linear` makes what computes the product of the router."""
    block.experts = experts
    for name in ("gate", "router"):
        router = getattr(block, name, None)
        if router is not None and type(router) is not nn.Linear:
            setattr(block, name, OwnRouter(router, make_linear))


class OwnRouter(nn.Module):
    """A router whose product is computed by another layer."""

    def __init__(self, router: nn.Module, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        # No submodule: some routers are linear layers.
        self._route = router.forward
        self._own = _OwnOperations(make_linear)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with self._own:
            return self._route(*given)


class _OwnOperations(TorchFunctionMode):
    """Computes what is given to `F.linear`, always with one weight and in one dtype, by a layer of its own, and the
    sigmoid of a number by itself."""

    def __init__(self, make_linear: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self._make_linear = make_linear
        self._linear: nn.Module | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.sigmoid, torch.Tensor.sigmoid):
            return func(apart(args[0]))
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        rows, *weights = args
        if self._linear is None:
            self._linear = self._make_linear(linear_of(*weights))
        return self._linear(rows)
