"""Angles, and rotation with the store of keys and values, against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pw_kernels import step


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [8, 20])
def test_angles(count: int, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 7, 4096, 131071])
    frequencies = 10000.0 ** -(torch.arange(count) / count)
    found = step.angles(positions, frequencies, 1.25, dtype, backend="triton")
    expected = step.angles(positions, frequencies, 1.25, dtype, backend="torch")
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (5, 2 * count)
        near(one, other)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normed", ["nothing", "queries and keys", "values too"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotated"), [(4, 2, 16, 16), (3, 1, 24, 24), (2, 2, 16, 8)]
)
def test_rotate_store(
    heads: int, kv_heads: int, size: int, rotated: int, normed: str, shared: bool
) -> None:
    tokens, total = 5, (heads + (1 if shared else 2) * kv_heads) * size
    qkv = random(tokens, total + 3)[:, :total]
    angles = random(tokens, rotated // 2, seed=1).repeat(1, 2)
    count = heads + kv_heads * (2 if normed == "values too" else 1)
    norm = None if normed == "nothing" else random(count, size, seed=2)
    slots = torch.tensor([7, 0, -1, 11, 4])
    pages = [torch.zeros(3, 4, kv_heads, size) for _ in range(4)]
    results = [
        step.rotate_store(
            qkv,
            angles.cos(),
            angles.sin(),
            keys,
            values,
            slots,
            head_size=size,
            norm=norm,
            epsilon=1e-6,
            shared_values=shared,
            backend=backend,
        )
        for backend, keys, values in (("torch", *pages[:2]), ("triton", *pages[2:]))
    ]
    assert results[0].shape == (tokens, heads, size)
    near(results[1], results[0])
    near(pages[2], pages[0])
    near(pages[3], pages[1])
    stored = pages[1].view(12, kv_heads, size)
    value = qkv[0].view(-1, size)[-kv_heads:]  # of one head and all others as it came
    if normed == "values too":
        assert norm is not None
        value = step.rms_norm(value, None, 1e-6) * norm[-kv_heads:]
    near(stored[7], value)
    assert int((stored.abs().sum((1, 2)) > 0).sum()) == 4  # the padding token left nothing
