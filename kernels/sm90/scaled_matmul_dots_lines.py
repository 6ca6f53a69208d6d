"""Lines of scaled_matmul's operands, for very few rows, in CuTe DSL: a warp fetches 128 columns of
its rows of W and a into shared memory of its own, and multiplies them.

Which column is which of those that one product adds up is free if W and a agree: so the lane
4 g + t takes 16 bytes from column 16 t on of the rows g and g + 8 of W, and of the row g of a, and
four bytes of each are what it must hold of the operands (PTX ISA, "Matrix fragments for
mma.m16n8k16" and "m16n8k32"). float8 codes are made float16, which is exact; sums of 64 columns
leave the tensor cores, and are added in float32.

Where 32 columns share a scale, the lanes of a row hold two groups at once. A tile of eight columns
is then four rows of a, twice: once with zeros instead of the second group, once of the first.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from qinductor.kernels.scaled_matmul_cute_form import Form
from qinductor.kernels.scaled_matmul_dots_form import (
    LINE,
    Config,
    Slot,
    columns,
    grouped,
    halves,
    tiles,
)
from qinductor.kernels.sm90.scaled_matmul_cute import NUMBERS
from qinductor.kernels.sm90.scaled_matmul_results import Results, ptx

# To shared memory, zeros where the last argument is 0.
_FETCH = """{
.reg .pred p;
setp.eq.b32 p, {$r2}, 0;
cp.async.%s [{$r0}], [{$r1}], %d, p;
}"""
ONCE, AGAIN = "cg.shared.global.L2::256B", "ca.shared.global"  # W is read once, a by every program
_LOAD_FOUR = """{
.reg .pred p;
setp.ne.b32 p, {$r1}, 0;
mov.b32 {$w0}, 0;
mov.b32 {$w1}, 0;
mov.b32 {$w2}, 0;
mov.b32 {$w3}, 0;
@p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];
}"""
_LOAD_ONE = """{
.reg .pred p;
setp.ne.b32 p, {$r1}, 0;
mov.b32 {$w0}, 0;
@p ld.global.b32 {$w0}, [{$r0}];
}"""
_WIDER = """{
.reg .b16 low, high;
mov.b32 {low, high}, {$r0};
cvt.rn.f16x2.%sx2 {$w0}, low;
cvt.rn.f16x2.%sx2 {$w1}, high;
}"""
_PRODUCT = (
    "mma.sync.aligned.%s {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, "
    "{{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};"
)
FLOATS, INTEGERS = "m16n8k16.row.col.f32.f16.f16.f32", "m16n8k32.row.col.s32.s8.s8.s32"
CODES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


class Lines(Results):
    """The part of `Dots` that warps do by themselves."""

    def __init__(self, form: Form, config: Config) -> None:
        self.form, self.work = form, config
        self.integers = form.a == "int8"
        self.grouped, self.halves = grouped(form), halves(form)
        self.slot = Slot(form, config)
        self.per = 8 // self.halves  # rows of a in a tile of columns
        self.tiles, self.columns = tiles(form, config), columns(form, config)
        self.sums = Int32 if self.integers else Float32  # of the tensor cores
        self.total = Float32 if self.grouped else self.sums
        self.groups = LINE // form.step if self.grouped else 0  # of a line, with one scale each

    @cute.jit
    def fetched_w(self, slot, at, tile, whole, column, w, sw):
        """Fetches a line of W, and its scales; zeros behind the end."""
        form, (n, k) = self.form, w.shape
        lane = cute.arch.lane_idx()
        for h in cutlass.range_constexpr(2):
            inside = Int32(tile < whole and column + lane % 4 * 16 + h * 64 < k)
            for i in cutlass.range_constexpr(self.work.rows // 8):
                place = slot + self.slot.w(h, i) + lane * 16
                ptx(_FETCH % (ONCE, 16), place, at[i] + h * 64, inside)
        if cutlass.const_expr(form.columns == "grid"):
            row = cutlass.min(tile * self.work.rows, n - 1) // form.bn
            if lane < self.groups:
                here = column + lane * form.step
                inside = Int32(here < k)
                here = cutlass.min(here, k - 1) // form.bk
                self.fetched_scale(slot + self.slot.sw + lane * 8, sw, row, here, inside)

    @cute.jit
    def fetched_scale(self, place, held, row, column, inside):
        """Fetches the word with a scale, which is at any byte of it."""
        at = self.address(held, row, column)
        ptx(_FETCH % (AGAIN, 4), place, at & -4, inside)
        self.shifted(place, held, at)

    @cute.jit
    def shifted(self, place, held, at):
        """Beside the word, the bit of it where the scale begins."""
        if cutlass.const_expr(held.element_type.width < 32):
            ptx("st.shared.b32 [{$r0}], {$r1};", place + 4, Int32(at & 3) * 8)

    @cute.jit
    def address(self, held, row, column):
        """Of a scale."""
        step = Int64(row) * held.stride[0] + Int64(column) * held.stride[1]
        return held.iterator.toint() + step * (held.element_type.width // 8)

    @cute.jit
    def chunks(self, slot, column, slab, a):
        """(place, address, whether it is inside) of what a lane fetches of a line of a, 16 bytes
        each."""
        m, k = a.shape
        q, found = self.work.q, []
        for e in cutlass.range_constexpr(-(-q * 8 // 32)):
            c = cute.arch.lane_idx() + e * 32
            row, here = slab + c // 4 % q, column + c // (4 * q) * 64 + c % 4 * 16
            at = a.iterator.toint() + Int64(row) * k + here
            found.append((slot + self.slot.a(0) + c * 16, at, Int32(row < m and here < k)))
        return found

    @cute.jit
    def entry(self, slot, column, slab, a, sa):
        """(place, row, column, whether it is inside) of the scale that a lane fetches for a."""
        m, k = a.shape
        lane, q = cute.arch.lane_idx(), self.work.q
        row, here = slab + lane % q, column + lane // q * self.form.step
        inside = Int32(row < m and here < k)
        here = cutlass.min(here, k - 1) // self.form.group
        return slot + self.slot.sa + lane * 8, cutlass.min(row, m - 1), here, inside

    @cute.jit
    def fetched_a(self, slot, column, slab, a, sa):
        """Fetches a line of a, and its scales."""
        lane, q = cute.arch.lane_idx(), self.work.q
        for place, at, inside in self.chunks(slot, column, slab, a):
            if q >= 4 or lane < q * 8:
                ptx(_FETCH % (AGAIN, 16), place, at, inside)
        if cutlass.const_expr(self.form.rows == "group"):
            place, row, here, inside = self.entry(slot, column, slab, a, sa)
            if lane < q * self.groups:
                self.fetched_scale(place, sa, row, here, inside)

    @cute.jit
    def loaded_a(self, own, begin, slab, a, sa):
        """The first lines of a, and their scales: by registers, as those of W are already on their
        way, and to wait for what was asked for later is to wait for them all."""
        lane, q = cute.arch.lane_idx(), self.work.q
        found, scales = [], []
        for u, column in enumerate(begin):
            for place, at, inside in self.chunks(own + u * self.slot.size, column, slab, a):
                if cutlass.const_expr(q < 4):
                    inside = Int32(inside != 0 and lane < q * 8)
                found.append((place, ptx(_LOAD_FOUR, at, inside, types=[Uint32] * 4)))
            if cutlass.const_expr(self.form.rows == "group"):
                slot = own + u * self.slot.size
                place, row, here, inside = self.entry(slot, column, slab, a, sa)
                inside = Int32(inside != 0 and lane < q * self.groups)
                at = self.address(sa, row, here)
                word = ptx(_LOAD_ONE, at & -4, inside, types=[Uint32])
                scales.append((place, at, word))
        for place, words in found:
            if q >= 4 or lane < q * 8:
                self.kept(place, words)
        for place, at, word in scales:
            if lane < q * self.groups:
                ptx("st.shared.b32 [{$r0}], {$r1};", place, word)
                self.shifted(place, sa, at)

    @cute.jit
    def kept(self, place, words):
        ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", place, *words)

    @cute.jit
    def words(self, place):
        """16 bytes of shared memory."""
        return ptx(
            "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", place, types=[Uint32] * 4
        )

    @cute.jit
    def line(self, slot):
        """A lane's words of a slot: (of W [h][i], of a [h][b], scales [h][b][column])."""
        lane, q = cute.arch.lane_idx(), self.work.q
        g, t = lane // 4, lane % 4
        left, right, scales = [], [], []
        for h in cutlass.range_constexpr(2):
            place = slot + lane * 16
            left.append([self.words(place + self.slot.w(h, i)) for i in range(self.work.rows // 8)])
            pairs, factors = [], []
            for b in cutlass.range_constexpr(self.tiles):
                row = b * self.per + g % self.per % q
                words = self.words(slot + self.slot.a(h) + (row * 4 + t) * 16)
                if cutlass.const_expr(self.halves == 2):
                    other = t // 2 != g // 4
                    words = [Uint32(0) if other else word for word in words]
                pairs.append(words)
                if cutlass.const_expr(self.grouped and h < max(1, self.groups // self.halves)):
                    factors.append(self.multipliers(slot, h, b, t))
            right.append(pairs)
            scales.append(factors)
        return left, right, scales

    @cute.jit
    def multipliers(self, slot, h: cutlass.Constexpr, b: cutlass.Constexpr, t):
        """What a lane's sums of its two columns are multiplied by."""
        group = h * self.halves + (t // 2 if self.halves == 2 else 0)
        found = []
        for v in cutlass.range_constexpr(2):
            value = Float32(1)
            if cutlass.const_expr(self.form.rows == "group"):
                row = b * self.per + (2 * t + v) % self.per % self.work.q
                place = slot + self.slot.sa + (group * self.work.q + row) * 8
                value = self.decoded(place, self.form.sa)
            if cutlass.const_expr(self.form.columns == "grid"):
                value = value * self.decoded(slot + self.slot.sw + group * 8, self.form.sw)
            found.append(value)
        return found

    @cute.jit
    def decoded(self, place, kind: cutlass.Constexpr):
        """A scale in shared memory."""
        number = NUMBERS[kind]
        if cutlass.const_expr(number.width == 32):
            return ptx("ld.shared.b32 {$w0}, [{$r0}];", place, types=[Float32])
        word, shift = ptx(
            "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", place, types=[Uint32, Uint32]
        )
        held = cute.make_rmem_tensor((1,), Uint32)
        held[0] = word >> shift
        return self.number(cute.recast_tensor(held, number), 0, 0)

    @cute.jit
    def multiplied(self, acc, left, right, scales):
        """Adds the products of a line."""
        whole = self.integers and not self.grouped  # sums stay in the tensor cores' registers
        code = _PRODUCT % (INTEGERS if self.integers else FLOATS)
        for b in cutlass.range_constexpr(self.tiles):
            other = [self.wider(right[h][b], self.form.a) for h in range(2)]
            for i in cutlass.range_constexpr(self.work.rows // 16):
                sums = []
                for h in cutlass.range_constexpr(2):
                    up = self.wider(left[h][2 * i], self.form.w)
                    down = self.wider(left[h][2 * i + 1], self.form.w)
                    part = [acc[c, i, b] if whole else self.sums(0) for c in range(4)]
                    for j in cutlass.range_constexpr(0, len(up), 2):
                        part = ptx(
                            code, up[j], down[j], up[j + 1], down[j + 1], other[h][j],
                            other[h][j + 1], *part, types=[self.sums] * 4,
                        )  # fmt: skip
                    if cutlass.const_expr(whole):
                        for c in cutlass.range_constexpr(4):
                            acc[c, i, b] = part[c]
                    sums.append(part)
                if cutlass.const_expr(not whole):
                    self.added_up(acc, sums, [found[b] for found in scales if found], i, b)

    @cute.jit
    def added_up(self, acc, sums, factors, i: cutlass.Constexpr, b: cutlass.Constexpr):
        """Adds the sums of the two halves of a line, times their scales."""
        for c in cutlass.range_constexpr(4):
            if cutlass.const_expr(len(factors) == 2):
                for h in cutlass.range_constexpr(2):
                    acc[c, i, b] = acc[c, i, b] + sums[h][c].to(Float32) * factors[h][c % 2]
            else:
                term = (sums[0][c] + sums[1][c]).to(Float32)
                if cutlass.const_expr(len(factors) == 1):
                    term = term * factors[0][c % 2]
                acc[c, i, b] = acc[c, i, b] + term

    @cute.jit
    def wider(self, words, codes: cutlass.Constexpr):
        """16 codes as the tensor cores take them: in words of four, or of two in float16."""
        if cutlass.const_expr(self.integers):
            return list(words)
        found = []
        for j in cutlass.range_constexpr(4):
            name = CODES[codes]
            found += ptx(_WIDER % (name, name), words[j], types=[Uint32] * 2)
        return found
