"""Routed experts from unquantized weights: the baseline that low widths are compared with.

Axes: T tokens, k experts of a token, E experts, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pw_kernels.reference import Activation, activate


def dense_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """Run the routed experts of one layer, one expert at a time in x's dtype.

    The experts of a token are added in slot order, as in `reference.fused_moe`; ids of E and above
    add nothing.

    Args:
        x: [T, H].
        topk_ids: [T, k] int64.
        topk_weights: [T, k].
        gate_up: [E, 2I, H], gate rows first; any float dtype, cast per expert.
        down: [E, H, I].
        activation: As for `reference.fused_moe`.
        gate_up_bias: [E, 2I] or None.
        down_bias: [E, H] or None.

    Returns:
        [T, H] in x's dtype.
    """
    tokens, slots = topk_ids.shape
    parts = x.new_zeros(tokens * slots, x.shape[1])
    flat = topk_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()[: gate_up.shape[0]]
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = order[start : start + count]
        start += count
        hidden = x[rows // slots] @ gate_up[expert].to(x.dtype).T
        if gate_up_bias is not None:
            hidden += gate_up_bias[expert]
        hidden = activate(hidden, activation, down.shape[2])
        result = hidden @ down[expert].to(x.dtype).T
        if down_bias is not None:
            result += down_bias[expert]
        parts[rows] = result
    weighted = parts.view(tokens, slots, -1) * topk_weights.unsqueeze(-1).to(x.dtype)
    return weighted.sum(1)
