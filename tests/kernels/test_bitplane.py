"""The layout, against the formula that documents it."""

from collections.abc import Callable

import pytest
import torch

from pw_kernels import bitplane

SHAPES = [(32, 128), (64, 384), (1, 1), (33, 129), (50, 200)]


@pytest.mark.parametrize(("rows", "cols"), [(64, 256), (33, 130)])
def test_bits_lie_where_the_layout_says(rows: int, cols: int) -> None:
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    planes = bitplane.pack_planes(codes, 8)
    col_tiles = -(-cols // 128)
    for _ in range(400):
        n, k = int(torch.randint(rows, ())), int(torch.randint(cols, ()))
        row, col = n % 32, k % 128
        i, r = divmod(row, 8)
        s, c, j = col // 32, col % 32 // 8, col % 8
        word = planes[:, n // 32 * col_tiles + k // 128, 4 * (4 * r + c) + i].tolist()
        bits = [(word[p] >> (4 * j + s + p) % 32) & 1 for p in range(8)]
        assert bits == [(int(codes[n, k]) >> (7 - p)) & 1 for p in range(8)]


@pytest.mark.parametrize(("rows", "cols"), SHAPES)
@pytest.mark.parametrize("max_bits", [1, 2, 4, 5, 8])
def test_first_planes_are_the_truncated_code(rows: int, cols: int, max_bits: int) -> None:
    codes = torch.randint(0, 1 << max_bits, (3, rows, cols), dtype=torch.uint8)
    planes = bitplane.pack_planes(codes, max_bits)
    assert planes.dtype == torch.int32
    assert planes.shape == (3, max_bits, bitplane.tile_count(rows, cols), 128)
    assert planes[0, 0].numel() * 4 == bitplane.plane_bytes(rows, cols)
    for bits in range(1, max_bits + 1):
        back = bitplane.unpack_planes(planes[:, :bits], rows, cols)
        assert torch.equal(back, codes >> (max_bits - bits))


def test_padding_is_zero() -> None:
    planes = bitplane.pack_planes(torch.full((33, 129), 255, dtype=torch.uint8), 8)
    padded = bitplane.unpack_planes(planes, 64, 256)
    assert padded[:33, :129].eq(255).all()
    padded[:33, :129] = 0
    assert not padded.any()


def test_kernel_order_reverses_bits_and_is_its_own_inverse() -> None:
    lut = torch.arange(8.0).repeat(2, 1)
    kernel = bitplane.bit_reverse_lut(lut)
    assert kernel[0].tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    assert torch.equal(bitplane.bit_reverse_lut(kernel), lut)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
def test_dequantize_is_exact(bits: int, dtype: torch.dtype) -> None:
    rows, cols = 50, 200
    codes = torch.randint(0, 256, (2, rows, cols), dtype=torch.uint8)
    natural = torch.randn(2, rows, 1 << bits).to(dtype)
    planes = bitplane.pack_planes(codes, 8)[:, :bits]
    got = bitplane.dequantize(planes, bitplane.bit_reverse_lut(natural), rows, cols)
    want = natural.gather(-1, (codes >> (8 - bits)).long())
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_sizes() -> None:
    assert bitplane.plane_bytes(2816, 2048) == 2816 * 2048 // 8
    assert bitplane.plane_bytes(33, 129) == 4 * 512
    assert bitplane.lut_bytes(33, 4) == 64 * 16 * 2
    assert bitplane.padded_rows(32) == 32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bitplane.pack_planes(torch.zeros(2, 2, dtype=torch.uint8), 9), "1 to 8 bits"),
        (lambda: bitplane.pack_planes(torch.zeros(2, 2), 4), "uint8"),
        (lambda: bitplane.unpack_planes(torch.zeros(2, 1, 128).int(), 33, 1), "2 tiles"),
        (lambda: bitplane.bit_reverse_lut(torch.zeros(3)), "power of two"),
        (
            lambda: bitplane.dequantize(torch.zeros(2, 1, 128).int(), torch.zeros(1, 8), 1, 1),
            "table of 4 entries",
        ),
    ],
)
def test_wrong_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
