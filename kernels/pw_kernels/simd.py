"""Sixteen-lane vectors for numba: the few instructions that the CPU kernels are made of.

Numba's own vectorizer may reorder a sum differently in two loops, and turns table lookups into
gathers. With explicit vectors the order of every sum is the same whatever the batch, and a table
of up to 64 entries is looked up in registers where the CPU can permute them (AVX-512). LLVM lowers
the same vectors to whatever else the CPU has.

`F16` is 16 float32 lanes, `I16` 16 int32 lanes; both live inside jitted code only. Offsets are in
elements of the array unless named otherwise. Numba's cache looks at the file of the cached function
alone: after an edit here, delete `__pycache__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16
_SHORT, _INT, _LONG = (ir.IntType(width) for width in (16, 32, 64))
_FLOAT = ir.FloatType()
_F, _I, _H = (ir.VectorType(element, LANES) for element in (_FLOAT, _INT, _SHORT))
_MASK, _L = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(_LONG, LANES)
_P = ir.VectorType(_FLOAT.as_pointer(), LANES)


class Vector(types.Type):
    """Numba type of a vector of 16 lanes."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)


F16, I16 = Vector("float32x16"), Vector("int32x16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, _F if fe_type.name == F16.name else _I)


def _constant(vector: ir.VectorType, values: list[Any]) -> ir.Constant:
    return ir.Constant(vector, [ir.Constant(vector.element, value) for value in values])


def _fill(vector: ir.VectorType, value: Any) -> ir.Constant:
    return _constant(vector, [value] * LANES)


def _splat(builder: Any, vector: ir.VectorType, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, first, _constant(_I, [0] * LANES))


def _call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Call an LLVM intrinsic by name."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fmuladd.v16f32", _F, [a, b, c])


def _address(context: Any, builder: Any, kind: Any, array: Any, offset: Any) -> Any:
    """Address of the element `offset` elements after the first one of an array."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [offset])


def _load(builder: Any, address: Any, vector: ir.VectorType, align: int) -> Any:
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=align)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.bitcast(address, value.type.as_pointer()), align=4)


def _permutes(context: Any) -> bool:
    """Whether the CPU that is compiled for can look up 16 and 32 floats in registers."""
    return any("+avx512f" in str(part) for part in context.codegen().magic_tuple())


def _widen(builder: Any, halves: Any, is_fp16: bool) -> Any:
    """Sixteen bf16 or finite fp16 bit patterns to float32, exactly."""
    bits = builder.zext(halves, _I)
    if not is_fp16:
        return builder.bitcast(builder.shl(bits, _fill(_I, 16)), _F)
    magnitude = builder.shl(builder.and_(bits, _fill(_I, 0x7FFF)), _fill(_I, 13))
    value = builder.fmul(builder.bitcast(magnitude, _F), _fill(_F, 2.0**112))
    sign = builder.shl(builder.and_(bits, _fill(_I, 0x8000)), _fill(_I, 16))
    return builder.bitcast(builder.or_(builder.bitcast(value, _I), sign), _F)


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:
    """Load 16 elements of a float32 array, or of a uint16 array that holds bf16, as `F16`."""
    is_float = array.dtype == types.float32

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args)
        if is_float:
            return _load(builder, address, _F, 4)
        return _widen(builder, _load(builder, address, _H, 2), is_fp16=False)

    return F16(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Store 16 lanes into a float32 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args[:2])
        _store(builder, args[2], address)
        return context.get_dummy_value()

    return types.void(array, types.intp, F16), codegen


@intrinsic
def load_words(typingctx: Any, arena: Any, byte_offset: Any, present: Any) -> Any:
    """Load 16 plane words, 64 bytes, from a uint8 array as `I16`; zeros, unread, if not present."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args[:2])
        pointer = builder.bitcast(address, _I.as_pointer())
        mask = _splat(builder, _MASK, args[2])
        name, none = "llvm.masked.load.v16i32.p0", _fill(_I, 0)
        return _call(builder, name, _I, [pointer, _INT(4), mask, none])

    return I16(arena, types.intp, types.boolean), codegen


@intrinsic
def load_entries(typingctx: Any, arena: Any, byte_offset: Any, count: Any, is_fp16: Any) -> Any:
    """Load up to 16 two-byte table entries from a uint8 array as `F16`, zeros after `count`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], *args[:2])
        lanes = _constant(_I, list(range(LANES)))
        mask = builder.icmp_signed("<", lanes, _splat(builder, _I, args[2]))
        halves = _call(
            builder,
            "llvm.masked.load.v16i16.p0",
            _H,
            [builder.bitcast(address, _H.as_pointer()), _INT(2), mask, _fill(_H, 0)],
        )
        wide = [_widen(builder, halves, is_fp16=flag) for flag in (True, False)]
        return builder.select(args[3], *wide)

    return F16(arena, types.intp, types.int32, types.boolean), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """One float in all lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, _F, args[0])

    return F16(types.float32), codegen


@intrinsic
def merge(typingctx: Any, p0: Any, p1: Any, p2: Any, p3: Any, slot: Any) -> Any:
    """Merge the words of four neighbouring planes into eight 4-bit indices each.

    Plane p keeps bits `0x11111111 << (slot + p) mod 4`; turned right by `slot`, nibble j then
    belongs to column 32*slot + 8*c + j, with plane p at bit p.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *planes, slot_value = args
        merged = _fill(_I, 0)
        for p, words in enumerate(planes):
            turn = builder.and_(builder.add(slot_value, _INT(p)), _INT(3))
            mask = _splat(builder, _I, builder.shl(_INT(0x11111111), turn))
            merged = builder.or_(merged, builder.and_(words, mask))
        shift = _splat(builder, _I, slot_value)
        return _call(builder, "llvm.fshr.v16i32", _I, [merged, merged, shift])

    return I16(I16, I16, I16, I16, types.int32), codegen


def _lookup(context: Any, builder: Any, size: int, table: Any, index: Any) -> Any:
    """Look up 16 indices below `size` in the float32 table at an address."""
    everywhere = _fill(_MASK, 1)
    if not _permutes(context):
        base = _splat(builder, _L, builder.ptrtoint(table, _LONG))
        offset = builder.shl(builder.zext(index, _L), _fill(_L, 2))
        pointers = builder.inttoptr(builder.add(base, offset), _P)
        args = [pointers, _INT(4), everywhere, _fill(_F, 0.0)]
        return _call(builder, "llvm.masked.gather.v16f32.v16p0", _F, args)
    if size > 64:
        args = [_fill(_F, 0.0), table, index, everywhere, _INT(4)]
        return _call(builder, "llvm.x86.avx512.mask.gather.dps.512", _F, args)
    parts = [_load(builder, builder.gep(table, [_LONG(i)]), _F, 4) for i in range(0, size, LANES)]
    if len(parts) == 1:
        return _call(builder, "llvm.x86.avx512.permvar.sf.512", _F, [*parts, index])
    name = "llvm.x86.avx512.vpermi2var.ps.512"
    pairs = [
        _call(builder, name, _F, [a, index, b])
        for a, b in zip(parts[::2], parts[1::2], strict=True)
    ]
    if len(pairs) == 1:
        return pairs[0]
    return builder.select(builder.icmp_unsigned(">=", index, _fill(_I, 32)), pairs[1], pairs[0])


def _define_decode(size: int) -> Any:
    """Build the intrinsic that turns the merged words of a slot into weights.

    Lane 4*c + i of the words holds the indices of columns 8*c to 8*c + 7 of row r + 8*i.
    """

    @intrinsic
    def decode(
        typingctx: Any, low: Any, high: Any, tables: Any, stride: Any, out: Any, at: Any, pitch: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            low_words, high_words, table_array, table_stride, out_array, offset, out_pitch = args
            shifts = _constant(_I, [4 * j for j in range(8)] * 2)

            def nibble(words: Any, lanes: list[int]) -> Any:
                copies = builder.shuffle_vector(words, words, _constant(_I, lanes))
                return builder.and_(builder.lshr(copies, shifts), _fill(_I, 15))

            for i in range(4):
                start = builder.mul(table_stride, _LONG(i))
                table = _address(context, builder, signature.args[2], table_array, start)
                for half in range(2):
                    lanes = [8 * half + i] * 8 + [8 * half + 4 + i] * 8
                    index = nibble(low_words, lanes)
                    if size > LANES:
                        upper = builder.shl(nibble(high_words, lanes), _fill(_I, 4))
                        index = builder.or_(index, upper)
                    weights = _lookup(context, builder, size, table, index)
                    row = builder.add(offset, builder.mul(out_pitch, _LONG(i)))
                    column = builder.add(row, _LONG(LANES * half))
                    target = _address(context, builder, signature.args[4], out_array, column)
                    _store(builder, weights, target)
            return context.get_dummy_value()

        intp = types.intp
        return types.void(I16, I16, tables, intp, out, intp, intp), codegen

    return decode


decode_16, decode_32, decode_64, decode_256 = (_define_decode(size) for size in (16, 32, 64, 256))


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Lane by lane a * b + c."""
    return F16(F16, F16, F16), lambda context, builder, signature, args: _fma(builder, *args)


@intrinsic
def mul(typingctx: Any, a: Any, b: Any) -> Any:
    """Lane by lane a * b."""
    return F16(F16, F16), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """Lane by lane the larger of a and b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call(builder, "llvm.maxnum.v16f32", _F, args)

    return F16(F16, F16), codegen


@intrinsic
def lane_sum(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes in the same order as `sums`."""
    return types.float32(F16), lambda context, builder, signature, args: _fold_lanes(
        builder, builder.fadd, args[0]
    )


@intrinsic
def lane_max(typingctx: Any, a: Any) -> Any:
    """Largest lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger(x: Any, y: Any) -> Any:
            return _call(builder, "llvm.maxnum.v16f32", _F, [x, y])

        return _fold_lanes(builder, larger, args[0])

    return types.float32(F16), codegen


def _fold_lanes(builder: Any, combine: Callable[[Any, Any], Any], value: Any) -> Any:
    for step in (8, 4, 2, 1):
        lanes = _constant(_I, [lane ^ step for lane in range(LANES)])
        value = combine(value, builder.shuffle_vector(value, value, lanes))
    return builder.extract_element(value, _INT(0))


@intrinsic
def sums(typingctx: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Sum of the lanes of four vectors, each in the same fixed order; a tuple of four floats."""
    result = types.UniTuple(types.float32, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
            parts = [
                builder.shuffle_vector(x, y, _constant(_I, lanes)) for lanes in (first, second)
            ]
            return builder.fadd(*parts)

        low, high = list(range(8)), list(range(16, 24))
        pairs = [
            fold(x, y, low + high, [lane + 8 for lane in low + high])
            for x, y in (args[:2], args[2:])
        ]
        quads = [lane + 8 * group for group in range(4) for lane in range(4)]
        total = fold(pairs[0], pairs[1], quads, [lane + 4 for lane in quads])
        for step in (2, 1):
            total = fold(total, total, list(range(16)), [lane ^ step for lane in range(16)])
        return cgutils.pack_array(
            builder, [builder.extract_element(total, _INT(4 * i)) for i in range(4)]
        )

    return result(F16, F16, F16, F16), codegen


def _exp(builder: Any, x: Any) -> Any:
    """Cephes' expf: 2^n times a polynomial, within 2 ulp; arguments are clamped to +-87."""
    x = _call(builder, "llvm.maxnum.v16f32", _F, [x, _fill(_F, -87.0)])
    x = _call(builder, "llvm.minnum.v16f32", _F, [x, _fill(_F, 87.0)])
    n = builder.fmul(x, _fill(_F, 1.44269504088896341))
    n = _call(builder, "llvm.rint.v16f32", _F, [n])
    r = _fma(builder, n, _fill(_F, -0.693359375), x)
    r = _fma(builder, n, _fill(_F, 2.12194440054690583e-4), r)
    poly = _fill(_F, 1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
        poly = _fma(builder, poly, r, _fill(_F, c))
    poly = _fma(builder, builder.fmul(r, r), poly, builder.fadd(r, _fill(_F, 1.0)))
    power = builder.add(builder.fptosi(n, _I), _fill(_I, 127))
    return builder.fmul(poly, builder.bitcast(builder.shl(power, _fill(_I, 23)), _F))


@intrinsic
def exp(typingctx: Any, x: Any) -> Any:
    """Lane by lane e^x; below -87 it stays at e^-87, about 1e-38."""
    return F16(F16), lambda context, builder, signature, args: _exp(builder, args[0])


@intrinsic
def swish(typingctx: Any, x: Any, z: Any) -> Any:
    """Lane by lane x * sigmoid(z)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        negative = builder.fmul(args[1], _fill(_F, -1.0))
        return builder.fdiv(args[0], builder.fadd(_exp(builder, negative), _fill(_F, 1.0)))

    return F16(F16, F16), codegen
