"""The cold gate's epilogue: turns a tile of sums into TwELL words and counts, so that r is never stored densely.

A tile of TwELL is TILE = 128 neighbouring columns of one token. It has SLOTS entries, each a word value << 16 | column
within the tile (fp32: value << 32 | column, 64 bits), and one byte that counts the active neurons and is never clipped.
If it exceeds SLOTS, the token is heavy and its words are not read.

On Hopper each thread stores the entries that it holds. In a row of a tile, thread q of a quad has columns 8 j + 2 q and
8 j + 2 q + 1 for j = 0 to 15; rounded to 16 bits, these two share one register, a pair. Each thread builds a mask with
one bit for every value that is not 0 (the first of a pair in the lower half):

    bits  |=  (((pair & 0x7fff7fff) + 0x7fff7fff) & 0x80008000) >> (15 - j)        a carry where a half is not 0

The popcounts of the quad's threads give each thread its first slot. Then, while bits are left, the thread takes the
lowest one, selects the pair among its 16 registers by a tree of selections, and stores one word. A loop is right
because few bits are set: a warp iterates as often as its busiest thread has entries (once or twice at 30 active neurons
of 5632). Testing each of a thread's 64 pairs took 1.08x to 1.12x of the time of cuBLAS's gate (H200), the loop takes
0.96x to 0.98x; 158 registers, no spills. Entries are in the order of threads and bits.

The assembly relies on where Triton puts a pair; ``is_laid_out`` checks the compiled kernel for that. Everywhere else
(other GPUs, other layouts, fp32) each value that is not 0 stores itself, in the order of columns. Triton's interpreter
has no inline assembly and does the same by tensor operations.
"""

from __future__ import annotations

import re

import triton
import triton.language as tl

from twell.formats import SLOTS, TILE
from twell.gpu.shared.tiles import INTERPRETED, popcount

_N = 32  # pairs per piece of assembly: two rows of a tile, register 2 j + r is pair j of row r
_REGISTERS = "[[8, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]"  # layout of [row, tile, q, j]
_LANES = "[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]"


def is_laid_out(ttgir: str) -> bool:
    """Whether the compiled kernel (its TTGIR) has all pairs where the assembly reads them."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    used = re.findall(rf"packed_element = {_N} : i32.*? : tensor<[0-9x]+xi32, (#\w+)>", ttgir)
    there = (f"register = {_REGISTERS}", f"lane = {_LANES}")
    return bool(used) and all(part in layouts.get(name, "") for name in used for part in there)


def _assembly(slots: int) -> str:
    """Operands: 32 unused results; 32 each of pairs, places (index of the row's tile among all tiles, or -1), addresses
    of the words and addresses of the counts."""
    pair, place, words, counts = (lambda k, base=base: f"${base + k}" for base in (_N, 2 * _N, 3 * _N, 4 * _N))
    lines = [
        "{",
        ".reg .pred p, p0, p1, p2, p3, odd, upper, first;",
        ".reg .b32 t, q, both, one, two, slot, low, b, j, c, sel, v, n0, n1, w0, w1;",
        ".reg .b32 s<15>;",
        ".reg .b64 a, g;",
        "mov.u32 q, %laneid;",
        "and.b32 t, q, 1;",
        "setp.ne.u32 odd, t, 0;",
        "and.b32 t, q, 2;",
        "setp.ne.u32 upper, t, 0;",
        "and.b32 q, q, 3;",
        "setp.eq.u32 first, q, 0;",
        "shl.b32 q, q, 1;",
    ]
    for r in (0, 1):
        lines.append(f"mov.u32 w{r}, 0;")
        for j in range(16):
            lines += [
                f"and.b32 t, {pair(2 * j + r)}, 0x7fff7fff;",
                "add.u32 t, t, 0x7fff7fff;",
                f"shr.u32 t, t, {15 - j};",
                f"and.b32 t, t, {0x80008000 >> (15 - j):#x};",
                f"or.b32 w{r}, w{r}, t;",
            ]
        lines += [  # a row past the last has no words
            f"setp.lt.s32 p, {place(r)}, 0;",
            f"@p mov.u32 w{r}, 0;",
            f"popc.b32 n{r}, w{r};",
        ]
    lines += [
        "shl.b32 both, n1, 16;",
        "or.b32 both, both, n0;",
        "shfl.sync.bfly.b32 one, both, 1, 0x1f, 0xffffffff;",
        "add.u32 both, both, one;",
        "shfl.sync.bfly.b32 two, both, 2, 0x1f, 0xffffffff;",
        "add.u32 both, both, two;",
        "@!odd mov.u32 one, 0;",
        "@!upper mov.u32 two, 0;",
        "add.u32 two, one, two;",  # entries of the quad's lower threads
    ]
    for r in (0, 1):
        lines += [
            f"setp.ge.and.s32 p, {place(r)}, 0, first;",
            f"cvt.s64.s32 a, {place(r)};",
            f"add.s64 g, {counts(r)}, a;",
            "and.b32 t, both, 0xffff;" if r == 0 else "shr.u32 t, both, 16;",
            "@p st.global.u8 [g], t;",
            "and.b32 slot, two, 0xffff;" if r == 0 else "shr.u32 slot, two, 16;",
            f"mad.lo.s64 a, a, {4 * slots}, {words(r)};",
            f"ROUND{r}:",
            f"setp.eq.u32 p, w{r}, 0;",
            f"@p bra DONE{r};",
            f"setp.ge.u32 p, slot, {slots};",
            f"@p bra DONE{r};",
            f"neg.s32 low, w{r};",
            f"and.b32 low, low, w{r};",
            f"xor.b32 w{r}, w{r}, low;",
            "bfind.u32 b, low;",
            "and.b32 j, b, 15;",
            "shr.u32 t, b, 4;",
        ]
        for k in range(4):
            lines += [f"and.b32 c, j, {1 << k};", f"setp.ne.u32 p{k}, c, 0;"]
        tree = [pair(2 * j + r) for j in range(16)]
        name = 0
        for k in range(4):
            nodes = []
            for left, right in zip(tree[::2], tree[1::2], strict=True):
                lines.append(f"selp.b32 s{name}, {right}, {left}, p{k};")
                nodes.append(f"s{name}")
                name += 1
            tree = nodes
        lines += [
            "shl.b32 c, j, 3;",
            "add.u32 c, c, q;",
            "add.u32 c, c, t;",
            "mad.lo.u32 sel, t, 0x2200, 0x1054;",
            f"prmt.b32 v, {tree[0]}, c, sel;",  # value << 16 | column
            "mul.wide.u32 g, slot, 4;",
            "add.s64 g, g, a;",
            "st.global.b32 [g], v;",
            "add.u32 slot, slot, 1;",
            f"bra ROUND{r};",
            f"DONE{r}:",
        ]
    lines += [f"mov.u32 ${k}, 0;" for k in range(_N)]
    lines.append("}")
    return "\n".join(lines)


def _store_one(slots: int, store: str, size: int) -> str:
    """Operands: an unused result; value; mask of its 32 columns; entries of the tile before these columns; index of the
    tile; column in the tile; address of the words."""
    return f"""{{
        .reg .pred p;
        .reg .b32 t, s, v;
        .reg .b64 a, b;
        mov.u32 $0, 0;
        setp.eq.u32 p, $1, 0;
        @p bra DONE;
        setp.lt.s32 p, $4, 0;
        @p bra DONE;
        and.b32 t, $5, 31;
        mov.u32 s, 1;
        shl.b32 t, s, t;
        sub.u32 t, t, 1;
        and.b32 t, t, $2;
        popc.b32 s, t;
        add.u32 s, s, $3;
        setp.ge.u32 p, s, {slots};
        @p bra DONE;
        cvt.s64.s32 a, $4;
        mad.lo.s64 a, a, {size * slots}, $6;
        mul.wide.u32 b, s, {size};
        add.s64 a, a, b;
        {store}
        DONE:
    }}"""


_STORE_ENTRIES = tl.constexpr(_assembly(SLOTS))
_STORE_16 = tl.constexpr(_store_one(SLOTS, "shl.b32 v, $1, 16; or.b32 v, v, $5; st.global.b32 [a], v;", 4))
_STORE_32 = tl.constexpr(_store_one(SLOTS, "st.global.v2.b32 [a], {$5, $1};", 8))
_OPERANDS = tl.constexpr(",".join(["=r"] * _N + ["r"] * (2 * _N) + ["l"] * (2 * _N)))
_TILE, _SLOTS = tl.constexpr(TILE), tl.constexpr(SLOTS)


@triton.jit
def store_pairs(pairs, place, o_words, o_counts, BM: tl.constexpr, BN: tl.constexpr):
    """Store entries and counts of ``pairs`` uint32 [BM, BN / 2] (see ``relu_pairs``).

    ``place`` int32 [BM, BN / TILE]: index of each row's tile among all tiles; -1 where there is none."""
    parts = tl.permute(tl.reshape(pairs, (BM, BN // _TILE, 16, 4)), (0, 1, 3, 2))  # row, tile, q, j
    zero = tl.zeros((BM, BN // _TILE, 4, 16), tl.int32)
    addresses = zero.to(tl.int64) + o_words.to(tl.int64), zero.to(tl.int64) + o_counts.to(tl.int64)
    tl.inline_asm_elementwise(
        _STORE_ENTRIES,
        _OPERANDS,
        [parts, zero + place[:, :, None, None], addresses[0], addresses[1]],
        dtype=tl.int32,
        is_pure=False,
        pack=32,
    )


@triton.jit
def store_columns(r, place, o_words, o_counts, BM: tl.constexpr, BN: tl.constexpr):
    """As ``store_pairs``, for r [BM, BN] of 16 or 32 bits in any layout: each value stores itself; a zero costs one
    test.

    A masked tl.store would move words and addresses to another layout, for which registers are lacking."""
    active = tl.reshape((r != 0).to(tl.uint32), (BM, BN // 32, 32))
    bits = tl.sum(active << tl.arange(0, 32).to(tl.uint32)[None, None, :], axis=2)  # a mask of 32 columns
    n = tl.reshape(popcount(bits), (BM, BN // _TILE, _TILE // 32))
    tl.store(o_counts + place, tl.sum(n, axis=2).to(tl.uint8), mask=place >= 0)
    before = tl.cumsum(n, axis=2) - n
    if INTERPRETED:
        below = (tl.full((32,), 1, tl.uint32) << tl.arange(0, 32).to(tl.uint32)) - 1
        slot = tl.reshape(before, (BM, BN // 32))[:, :, None] + popcount(bits[:, :, None] & below[None, None, :])
        slot = tl.reshape(slot, (BM, BN))
        column = tl.arange(0, BN) % _TILE
        if r.dtype.primitive_bitwidth == 16:
            word = (r.to(tl.uint16, bitcast=True).to(tl.uint32) << 16) | column[None, :].to(tl.uint32)
        else:
            word = (r.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | column[None, :].to(tl.uint64)
        tile = tl.zeros((BM, BN // _TILE, _TILE), tl.int64) + place[:, :, None]
        tile = tl.reshape(tile, (BM, BN))
        there = (tile >= 0) & (r != 0) & (slot < _SLOTS)
        tl.store(o_words + tile * _SLOTS + slot, word.to(o_words.dtype.element_ty, bitcast=True), mask=there)
    else:
        if r.dtype.primitive_bitwidth == 16:
            value = r.to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            value = r.to(tl.uint32, bitcast=True)
        zero = tl.zeros((BM, BN // _TILE, _TILE // 32, 32), tl.int32)
        operands = [
            tl.reshape(value, (BM, BN // _TILE, _TILE // 32, 32)),
            zero + tl.reshape(bits, (BM, BN // _TILE, _TILE // 32))[:, :, :, None].to(tl.int32),
            zero + before[:, :, :, None],
            zero + place[:, :, None, None],
            zero + tl.reshape(tl.arange(0, _TILE), (_TILE // 32, 32))[None, None, :, :],
            zero.to(tl.int64) + o_words.to(tl.int64),
        ]
        if r.dtype.primitive_bitwidth == 16:
            tl.inline_asm_elementwise(_STORE_16, "=r,r,r,r,r,r,l", operands, dtype=tl.int32, is_pure=False, pack=1)
        else:
            tl.inline_asm_elementwise(_STORE_32, "=r,r,r,r,r,r,l", operands, dtype=tl.int32, is_pure=False, pack=1)
