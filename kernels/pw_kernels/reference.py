"""What every kernel means, in plain torch and fp32. Slow, exact, on any device.

Axes: T tokens, k experts of a token, E experts, N rows, K columns, H hidden size, I intermediate
size, S rows of one expert's batch, B sequences, M pages of a block table, P pages, Hq / Hkv query
and key heads, Dk / Dv head sizes. `arena` is [P, page_bytes] uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pw_kernels.bitplane import TILE_WORDS, dequantize, lut_bytes, padded_rows, plane_bytes
from pw_kernels.pages import NO_PAGE, WeightPages

Activation = str | Callable[[Tensor], Tensor]  # named: act(gate) * up; callable: [S, 2I] -> [S, I]
Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor], None]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def decode_block(arena: Tensor, pages: WeightPages, expert: int, lut_dtype: torch.dtype) -> Tensor:
    """Decode one block at its committed width.

    Returns:
        [N, K] fp32, exactly the table entries.

    Raises:
        ValueError: A page that the committed width needs is absent.
    """
    bits = int(pages.bits[expert])
    size = plane_bytes(pages.rows, pages.cols)
    words = [
        _read(arena, pages.plane_pages[expert, p], 0, size).view(torch.int32).view(-1, TILE_WORDS)
        for p in range(bits)
    ]
    offset, length = int(pages.lut_offset[expert]), lut_bytes(pages.rows, bits)
    table = _read(arena, pages.lut_pages[expert], offset, length).view(lut_dtype)
    lut = table.view(padded_rows(pages.rows), 1 << bits)
    return dequantize(torch.stack(words), lut, pages.rows, pages.cols).float()


def fused_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    arena: Tensor,
    gate_up: WeightPages,
    down: WeightPages,
    *,
    lut_dtype: torch.dtype,
    activation: Activation,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """Run the routed experts of one layer.

    The experts of a token are added in slot order, so a token's result does not depend on which
    experts the rest of the batch chose. A slot whose id is outside [0, E) adds nothing.

    Args:
        x: [T, H].
        topk_ids: [T, k] int64.
        topk_weights: [T, k].
        arena: [P, page_bytes] uint8.
        gate_up: Blocks [2I, H] (gate rows first), or [I, H] for experts without a gate.
        down: Blocks [H, I].
        lut_dtype: bfloat16 or float16.
        activation: "silu", "gelu", "gelu_tanh", or a callable on the gate_up output.
        gate_up_bias: [E, 2I] or None.
        down_bias: [E, H] or None.
        observer: Called as (expert, token_index [n] int64, weights [n], inputs [n, H] fp32,
            hidden [n, I] fp32) for each expert that has tokens, in ascending order.

    Returns:
        [T, H] in the dtype of `x`.
    """
    inputs = x.float()
    slots = torch.zeros(*topk_ids.shape, down.rows, device=x.device)  # [T, k, H]
    for expert in range(gate_up.experts):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        rows = inputs[token]
        hidden = rows @ decode_block(arena, gate_up, expert, lut_dtype).T
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert].float()
        hidden = activate(hidden, activation, down.cols)
        if observer is not None:
            observer(expert, token, topk_weights[token, slot], rows, hidden)
        out = hidden @ decode_block(arena, down, expert, lut_dtype).T
        if down_bias is not None:
            out = out + down_bias[expert].float()
        slots[token, slot] = out
    total = torch.zeros(x.shape[0], down.rows, device=x.device)
    for j in range(topk_ids.shape[1]):
        total += topk_weights[:, j, None].float() * slots[:, j]
    return total.to(x.dtype)


def count_routing(statistics: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Add the router weights of each expert, and their squares, to [2, E] fp32 in place."""
    experts = statistics.shape[1]
    ids, weights = topk_ids.flatten(), topk_weights.flatten().float()
    weights = torch.where((ids >= 0) & (ids < experts), weights, 0.0)
    ids = ids.clamp(0, experts - 1)
    statistics[0].index_add_(0, ids, weights)
    statistics[1].index_add_(0, ids, weights * weights)


def only_live(topk_ids: Tensor, live: Tensor) -> Tensor:
    """Expert ids [T, k] with -1, no expert, in the rows from live[0] on: padding of a batch."""
    rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)
    return torch.where(rows[:, None] < live, topk_ids, -1)


def activate(hidden: Tensor, activation: Activation, width: int) -> Tensor:
    """Apply an activation to gate_up outputs: [S, 2I] gated or [S, I] plain, to [S, I]."""
    if not isinstance(activation, str):
        return activation(hidden)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    function = ACTIVATIONS[activation]
    if hidden.shape[-1] == width:
        return function(hidden)
    return function(hidden[..., :width]) * hidden[..., width:]


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store keys and values of new tokens into their pages, in place.

    Args:
        k: [T, Hkv, Dk].
        v: [T, Hkv, Dv].
        k_pages: [P, tok, Hkv, Dk] strided view of the arena.
        v_pages: [P, tok, Hkv, Dv] strided view of the arena.
        slots: [T] int64, page * tok + offset; -1 stores nothing.
    """
    keep = slots >= 0
    page, offset = slots[keep] // k_pages.shape[1], slots[keep] % k_pages.shape[1]
    k_pages[page, offset] = k[keep].to(k_pages.dtype)
    v_pages[page, offset] = v[keep].to(v_pages.dtype)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of packed queries over paged keys and values.

    The queries of sequence b are rows query_start[b] to query_start[b+1] and sit at the end of its
    seq_lens[b] tokens, whose keys are stored already. Table entries left of a window are not read.

    Args:
        q: [T, Hq, Dk]; head h reads key head h // (Hq / Hkv).
        k_pages: [P, tok, Hkv, Dk] strided view of the arena.
        v_pages: [P, tok, Hkv, Dv] strided view of the arena.
        block_tables: [B, M] int32 page ids.
        query_start: [B+1] int32.
        seq_lens: [B] int32, tokens of each sequence including its queries.
        scale: Factor of q . k.
        window: A query at position i sees keys after i - window; None sees all.
        softcap: Scores become softcap * tanh(score / softcap).
        sinks: [Hq] extra score of each head that joins the softmax and has no value.

    Returns:
        [T, Hq, Dv] in the dtype of `q`; rows of no sequence are zero.
    """
    out = torch.zeros(*q.shape[:2], v_pages.shape[-1], device=q.device)
    starts = query_start.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        begin, end = starts[b], starts[b + 1]
        if begin == end:
            continue
        first = length - (end - begin)  # position of the first query
        low = 0 if window is None else max(0, first - window + 1)
        keys = _sequence(k_pages, block_tables[b], low, length)
        values = _sequence(v_pages, block_tables[b], low, length)
        positions = torch.arange(first, length, device=q.device)[:, None]
        key_positions = torch.arange(low, length, device=q.device)
        hidden = key_positions > positions
        if window is not None:
            hidden |= key_positions <= positions - window
        out[begin:end] = _attend(q[begin:end].float(), keys, values, hidden, scale, softcap, sinks)
    return out.to(q.dtype)


def peer_sum(parts: Sequence[Tensor], add: Tensor | None = None) -> Tensor:
    """The sum of what ranks have, in their order, plus `add`: in fp32, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in [*parts, *([] if add is None else [add])]:
        total += part.float()
    return total.to(parts[0].dtype)


def _attend(
    q: Tensor,  # [n, Hq, Dk]
    keys: Tensor,  # [S, Hkv, Dk]
    values: Tensor,  # [S, Hkv, Dv]
    hidden: Tensor,  # [n, S] bool, True where a query may not look
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    scores = torch.einsum("nhd,shd->hns", q, keys.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, extra], -1)
    weights = torch.softmax(scores, -1)[..., : keys.shape[0]]
    return torch.einsum("hns,shd->nhd", weights, values.repeat_interleave(group, 1))


def _sequence(pages: Tensor, table: Tensor, low: int, high: int) -> Tensor:
    """Gather positions [low, high) of one sequence, [high - low, Hkv, D] fp32."""
    size = pages.shape[1]
    skip = low // size
    used = table[skip : -(-high // size)].long()
    return pages[used].flatten(0, 1)[low - skip * size : high - skip * size].float()


def _read(arena: Tensor, page_ids: Tensor, offset: int, length: int) -> Tensor:
    """Copy `length` bytes at byte `offset` of the region made of these pages."""
    page_bytes = arena.shape[1]
    first = offset // page_bytes
    used = page_ids[first : -(-(offset + length) // page_bytes)].long()
    if used.numel() * page_bytes < offset - first * page_bytes + length or (used == NO_PAGE).any():
        raise ValueError(
            f"{length} bytes at byte {offset} are not resident: pages {page_ids.tolist()}"
        )
    start = offset - first * page_bytes
    return arena[used].flatten()[start : start + length].clone()
