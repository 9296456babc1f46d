"""The bit-plane layout `tile32x128-rot1`: packing, unpacking, sizes. Knows no pages, no models.

Axes: N rows (outputs), K columns (inputs), B planes, b width in bits of a code.

A block of [N, K] codes is padded to whole tiles of 32 rows x 128 columns (pad codes are 0). One
plane of one tile is 128 words of 32 bits, 512 bytes; tiles follow in row-major order:

    tile      word 4*L + i, lane L = 0..31, i = 0..3     r = L >> 2, c = L & 3
    row       r + 8*i of the tile
    column    32*s + 8*c + j of the tile                 s = 0..3, j = 0..7
    bit       (4*j + s + p) mod 32, p the plane          p = 0 is the most significant plane

So the 16 words that start at word 16*r hold rows r, r+8, r+16, r+24 whole, and the rotation by p
puts the planes of one weight side by side: masking each plane with a rotated 0x11111111 and
or-ing gives eight 4-bit table indices at once, plane p at bit p of each. That is why a table of a
width is kept in *kernel order*, entry `sum(bit_p << p)`: the natural code with its bits reversed.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUT = "tile32x128-rot1"
TILE_ROWS = 32
TILE_COLS = 128
TILE_WORDS = 128
TILE_BYTES = 4 * TILE_WORDS
MAX_BITS = 8

_LOW_BITS = 0x0101010101010101  # bit 0 of each of eight bytes
_GATHER = 0x0102040810204080  # multiplier that moves bit 0 of byte t to bit 56 + t, without carry
_DIAGONAL = 0x8040201008040201 - (1 << 64)  # bit t of byte t
_CARRY = 0x7F7F7F7F7F7F7F7F  # lifts any bit of a byte to its bit 7


def _tiles(extent: int, tile: int) -> int:
    return -(-extent // tile)


def padded_rows(rows: int) -> int:
    """Rows rounded up to whole tiles."""
    return _tiles(rows, TILE_ROWS) * TILE_ROWS


def padded_cols(cols: int) -> int:
    """Columns rounded up to whole tiles."""
    return _tiles(cols, TILE_COLS) * TILE_COLS


def tile_count(rows: int, cols: int) -> int:
    """Number of tiles of one plane of a block."""
    return _tiles(rows, TILE_ROWS) * _tiles(cols, TILE_COLS)


def plane_bytes(rows: int, cols: int) -> int:
    """Bytes of one plane of a block, tile padding included."""
    return tile_count(rows, cols) * TILE_BYTES


def lut_bytes(rows: int, bits: int) -> int:
    """Bytes of a block's table at one width: 2-byte entries, rows padded to whole tiles."""
    return padded_rows(rows) * (2 << bits)


def pack_planes(codes: Tensor, max_bits: int) -> Tensor:
    """Cut codes into bit-planes in kernel word order.

    Args:
        codes: [..., N, K] uint8, each below 2^max_bits.
        max_bits: B, the width of the codes, 1 to 8.

    Returns:
        [..., B, tiles, 128] int32, most significant plane first.
    """
    _check_width(max_bits)
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
    *lead, rows, cols = codes.shape
    row_tiles, col_tiles = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    pad = (0, col_tiles * TILE_COLS - cols, 0, row_tiles * TILE_ROWS - rows)
    if any(pad):
        codes = torch.nn.functional.pad(codes, pad)
    # [.., RT, i, r, CT, s, c, j] -> [.., RT, CT, r, c, i, j, s]: a word's bits in order, unrotated
    split = codes.reshape(-1, row_tiles, 4, 8, col_tiles, 4, 4, 8)
    order = split.permute(0, 1, 4, 3, 6, 2, 7, 5).contiguous()
    octets = order.flatten(-2).view(torch.int64)  # [-1, RT, CT, r, c, i, 4]: eight codes each
    planes = []
    for p in range(max_bits):
        packed = ((octets >> (max_bits - 1 - p)) & _LOW_BITS) * _GATHER >> 56
        words = packed.to(torch.uint8).view(torch.int32)
        planes.append(rotate_left(words, p).view(-1, row_tiles * col_tiles, TILE_WORDS))
    return torch.stack(planes, 1).view(*lead, max_bits, row_tiles * col_tiles, TILE_WORDS)


def unpack_planes(planes: Tensor, rows: int, cols: int) -> Tensor:
    """Read back natural codes from the first planes of a block.

    Args:
        planes: [..., b, tiles, 128] int32, the b most significant planes.
        rows: N, without padding.
        cols: K, without padding.

    Returns:
        [..., N, K] uint8 natural codes of width b, that is `codes >> (max_bits - b)`.
    """
    *lead, bits, tiles, words = planes.shape
    _check_width(bits)
    if words != TILE_WORDS or tiles != tile_count(rows, cols):
        raise ValueError(
            f"planes of [{rows}, {cols}] need {tile_count(rows, cols)} tiles of {TILE_WORDS}"
            f" words, got {tiles} tiles of {words}"
        )
    row_tiles, col_tiles = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    codes = torch.zeros((), dtype=torch.int64, device=planes.device)
    for p in range(bits):
        plane = rotate_left(planes[..., p, :, :], -p)
        octets = plane.contiguous().view(torch.uint8).to(torch.int64)
        spread = ((octets * _LOW_BITS & _DIAGONAL) + _CARRY >> 7) & _LOW_BITS
        codes = (codes << 1) | spread
    order = codes.view(torch.uint8).view(-1, row_tiles, col_tiles, 8, 4, 4, 8, 4)
    padded = order.permute(0, 1, 5, 3, 2, 7, 4, 6).reshape(
        *lead, row_tiles * TILE_ROWS, col_tiles * TILE_COLS
    )
    return padded[..., :rows, :cols].contiguous()


def bit_reverse_lut(lut: Tensor) -> Tensor:
    """Turn a table from natural to kernel order or back (it is its own inverse).

    Args:
        lut: [..., 2^b], any dtype.
    """
    size = lut.shape[-1]
    bits = size.bit_length() - 1
    if size != 1 << bits:
        raise ValueError(f"a table must have a power of two entries, got {size}")
    index = torch.arange(size, device=lut.device)
    reverse = torch.zeros_like(index)
    for p in range(bits):
        reverse |= ((index >> p) & 1) << (bits - 1 - p)
    return lut[..., reverse]


def dequantize(planes: Tensor, lut: Tensor, rows: int, cols: int) -> Tensor:
    """Decode weights exactly: one table entry per code.

    Args:
        planes: [..., b, tiles, 128] int32, the first b planes.
        lut: [..., N or more, 2^b] in kernel order.
        rows: N.
        cols: K.

    Returns:
        [..., N, K] in the dtype of `lut`.
    """
    bits = planes.shape[-3]
    if lut.shape[-1] != 1 << bits:
        raise ValueError(f"{bits} planes need a table of {1 << bits} entries, got {lut.shape[-1]}")
    codes = unpack_planes(planes, rows, cols).to(torch.int64)
    return torch.gather(bit_reverse_lut(lut[..., :rows, :]), -1, codes)


def rotate_left(words: Tensor, count: int) -> Tensor:
    """Rotate int32 words left by so many bits; right by a negative number."""
    count %= 32
    if count == 0:
        return words
    return (words << count) | ((words >> (32 - count)) & ((1 << count) - 1))


def _check_width(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"a code has 1 to {MAX_BITS} bits, got {bits}")
