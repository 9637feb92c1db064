"""TwELL and Hybrid: bit-exact round trips, honest overflow, and every invariant refusing what breaks it."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from twell.formats import Hybrid, TwELL

DTYPES_16BIT = (torch.bfloat16, torch.float16)
DTYPES_IN_WORDS = (*DTYPES_16BIT, torch.float32)
DTYPES = (*DTYPES_IN_WORDS, torch.float64)
INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALLEST_SUBNORMAL, NAN_WITH_PAYLOAD = 1, -1  # as bit patterns, the same for every float dtype


# ---------------------------------------------------------------------------------------------------------
# Helpers: matrices to pack, and slow, obvious statements of what the formats must hold
# ---------------------------------------------------------------------------------------------------------


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(INT_OF_SIZE[t.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def canonical(g: Tensor) -> Tensor:
    """What a round trip must give back: -0.0 is not active, so it returns as +0.0."""
    return torch.where(g == 0, torch.zeros_like(g), g)


def active_columns(g: Tensor) -> list[list[int]]:
    return [[c for c, v in enumerate(row) if v != 0] for row in g.tolist()]


def active_by_tile(g: Tensor, tile: int) -> list[list[list[int]]]:
    starts = range(0, g.shape[1], tile)
    return [[[c for c in cols if s <= c < s + tile] for s in starts] for cols in active_columns(g)]


def stored_lists(g: Tensor, tile: int, slots: int) -> list[list[list[int]]]:
    """Nothing of a row that overflows."""
    return [[c if max(map(len, row)) <= slots else [] for c in row] for row in active_by_tile(g, tile)]


def longest_list(g: Tensor, tile: int) -> int:
    return max((len(cols) for tiles in active_by_tile(g, tile) for cols in tiles), default=0)


def padded(items: list[int], length: int) -> list[int]:
    kept = items[:length]
    return kept + [0] * (length - len(kept))


def edited(t: Tensor, index: tuple[int, ...] | int, value: float | Tensor) -> Tensor:
    t = t.clone()
    t[index] = value
    return t


def swapped(t: Tensor, a: tuple[int, ...], b: tuple[int, ...]) -> Tensor:
    return edited(edited(t, a, t[b]), b, t[a])


def flipped(t: Tensor, index: tuple[int, ...], mask: int = 1) -> Tensor:
    """A copy of ``t`` with the given bits of one element changed."""
    t = t.clone()
    t.view(INT_OF_SIZE[t.element_size()])[index] ^= mask
    return t


@st.composite
def matrices(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Tensor:
    """Empty to full [0..12, 0..70] matrices with NaN, inf, -0.0 and subnormals sprinkled in."""
    M, F = draw(st.integers(0, 12)), draw(st.integers(0, 70))
    dtype = draw(st.sampled_from(dtypes))
    density = draw(st.sampled_from((0.0, 0.03, 0.2, 0.7, 1.0)))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    g = torch.randn(M, F, generator=seeded, dtype=torch.float64).to(dtype)
    g[torch.rand(M, F, generator=seeded) >= density] = 0
    if M and F:
        where = st.tuples(st.integers(0, M - 1), st.integers(0, F - 1))
        floats = st.sampled_from((float("nan"), float("inf"), -float("inf"), -0.0))
        for at, value in draw(st.dictionaries(where, floats, max_size=6)).items():
            g[at] = value
        patterns = st.sampled_from((SMALLEST_SUBNORMAL, NAN_WITH_PAYLOAD))
        for at, pattern in draw(st.dictionaries(where, patterns, max_size=4)).items():
            bits(g)[at] = pattern
    return g.T.contiguous().T if draw(st.booleans()) else g


tiles = st.integers(1, 40)
each_count_dtype = pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])


def pack_whole(g: Tensor, tile: int, compact: bool = False) -> TwELL:
    return TwELL.pack(g, tile=tile, slots=max(longest_list(g, tile), 1), compact=compact)


def as_a_kernel_writes(packed: TwELL) -> TwELL:
    """The words of each tile in falling order; -1, which is NaN in no column, in slots that nobody may read."""
    last = packed.counts.long().unsqueeze(-1) - 1 - torch.arange(packed.slots)
    used = (last >= 0) & ~packed.overflowed[:, None, None]
    words = packed.words.gather(-1, last.where(used, 0)).where(used, -1)
    return TwELL.from_words(words, packed.counts, shape=packed.shape, dtype=packed.dtype, tile=packed.tile)


def sample(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([[0, 5, 0, 0, 6, 7], [0, 0, 0, 8, 0, 0]], dtype=dtype)


# ---------------------------------------------------------------------------------------------------------
# TwELL: packing and reading
# ---------------------------------------------------------------------------------------------------------


@given(matrices(), tiles)
def test_twell_plain_round_trip_is_bit_exact(g: Tensor, tile: int) -> None:
    assert same_bits(pack_whole(g, tile).unpack(), canonical(g))


@given(matrices(DTYPES_IN_WORDS), tiles)
def test_twell_word_round_trip_is_bit_exact(g: Tensor, tile: int) -> None:
    packed = pack_whole(g, tile, compact=True)
    assert packed.words is not None and packed.values is None and packed.indices is None
    assert same_bits(packed.unpack(), canonical(g))


@given(matrices(), tiles, st.integers(1, 12))
def test_twell_plain_lists_hold_the_entries_of_rows_that_fit_and_true_counts(g: Tensor, tile: int, slots: int) -> None:
    packed = TwELL.pack(g, tile=tile, slots=slots, overflow="mark")
    lists = active_by_tile(g, tile)
    g_bits = bits(g).tolist()
    assert packed.counts.dtype == torch.uint8
    assert packed.counts.tolist() == [[len(cols) for cols in row] for row in lists]
    stored = stored_lists(g, tile, slots)
    assert packed.columns.dtype == torch.int64
    assert packed.columns.tolist() == [[padded(cols, slots) for cols in row] for row in stored]
    assert packed.indices is not None and packed.indices.dtype == torch.int16
    assert packed.values is not None and packed.values.dtype == g.dtype
    assert bits(packed.values).tolist() == [
        [padded([g_bits[m][c] for c in cols], slots) for cols in row] for m, row in enumerate(stored)
    ]


@given(matrices(DTYPES_IN_WORDS), tiles, st.integers(1, 12))
def test_twell_words_are_value_and_column_within_the_tile(g: Tensor, tile: int, slots: int) -> None:
    packed = TwELL.pack(g, tile=tile, slots=slots, compact=True, overflow="mark")
    g_bits, width = bits(g).tolist(), 8 * g.element_size()
    expected = [
        [padded([g_bits[m][c] << width | c % tile for c in cols], slots) for cols in row]
        for m, row in enumerate(stored_lists(g, tile, slots))
    ]
    assert packed.words is not None and packed.words.dtype == (torch.int64 if width == 32 else torch.int32)
    assert packed.words.tolist() == expected
    assert packed.counts.tolist() == [[len(cols) for cols in row] for row in active_by_tile(g, tile)]


@given(matrices(DTYPES_IN_WORDS), tiles, st.booleans())
def test_twell_entries_come_by_row_then_column(g: Tensor, tile: int, in_words: bool) -> None:
    packed = as_a_kernel_writes(pack_whole(g, tile, compact=True)) if in_words else pack_whole(g, tile)
    row, col, value = packed.entries()
    expected = [(m, c) for m, cols in enumerate(active_columns(g)) for c in cols]
    assert list(zip(row.tolist(), col.tolist(), strict=True)) == expected
    assert same_bits(value, g[row, col])


@given(matrices(DTYPES_IN_WORDS), tiles, st.integers(1, 8))
def test_twell_forms_convert_both_ways_whatever_the_order_of_words(g: Tensor, tile: int, slots: int) -> None:
    plain = TwELL.pack(g, tile=tile, slots=slots, overflow="mark")
    packed = TwELL.pack(g, tile=tile, slots=slots, compact=True, overflow="mark")
    words = as_a_kernel_writes(packed)
    assert words == packed and plain.compact() == words and words.plain() == plain
    assert torch.equal(words.compact().words, packed.words)
    assert torch.equal(words.plain().indices, plain.indices) and same_bits(words.plain().values, plain.values)
    assert torch.equal(plain.overflowed, words.overflowed)
    assert torch.equal(plain.columns, words.columns)


@each_count_dtype
def test_twell_counts_of_either_dtype_do_not_wrap(dtype: torch.dtype) -> None:
    g = torch.ones(2, 510)
    g[1, :200] = 0
    packed = TwELL.pack(g, tile=255, slots=300, compact=True)  # 300 and 510 are more than a byte holds
    packed = dataclasses.replace(packed, counts=packed.counts.to(dtype))
    assert packed == TwELL.pack(g, tile=255, slots=300, compact=True)
    assert not packed.overflowed.any() and same_bits(packed.unpack(), g)
    assert packed.plain() == TwELL.pack(g, tile=255, slots=300)
    assert "820 active" in repr(packed)


def test_twell_without_check_reads_nothing() -> None:
    words, counts = torch.zeros(2, 1, 4, dtype=torch.int32), torch.full((2, 1), 2, dtype=torch.uint8)
    form = {"shape": (2, 100), "dtype": torch.bfloat16}
    kernel = TwELL.from_words(words.to("meta"), counts.to("meta"), **form, check=False)
    assert (kernel.tile, kernel.slots, kernel.shape) == (128, 4, (2, 100))
    with pytest.raises(ValueError, match="a stored value is zero"):
        TwELL.from_words(words, counts, **form)


@pytest.mark.parametrize("words", [[[[0]]], torch.zeros(2, 4, dtype=torch.int32)])
def test_twell_from_words_refuses_what_are_no_words(words: object) -> None:
    with pytest.raises(ValueError, match=r"words must be a tensor \[M, n_tiles, slots\]"):
        TwELL.from_words(words, torch.zeros(2, 2, dtype=torch.uint8), shape=(2, 6), tile=3, dtype=torch.bfloat16)


def test_twell_from_words_takes_words_that_are_not_contiguous() -> None:
    packed = TwELL.pack(sample(torch.bfloat16), tile=3, slots=4, compact=True)
    strided = packed.words.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous()
    assert TwELL.from_words(strided, packed.counts, shape=(2, 6), tile=3, dtype=torch.bfloat16) == packed


def test_twell_last_tile_may_be_partial() -> None:
    g = torch.arange(1.0, 8.0).view(1, 7)
    packed = TwELL.pack(g, tile=3, slots=3)
    assert packed.counts.tolist() == [[3, 3, 1]]
    assert packed.columns.tolist() == [[[0, 1, 2], [3, 4, 5], [6, 0, 0]]]
    assert same_bits(packed.unpack(), g)


def test_twell_tile_wider_than_the_matrix() -> None:
    packed = TwELL.pack(sample(), tile=256, slots=3)
    assert packed.counts.tolist() == [[3], [1]]
    assert same_bits(packed.unpack(), sample())


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0)])
@pytest.mark.parametrize("compact", [False, True])
def test_twell_empty_matrices(shape: tuple[int, int], compact: bool) -> None:
    g = torch.zeros(shape, dtype=torch.bfloat16)
    packed = TwELL.pack(g, tile=4, slots=2, compact=compact)
    assert packed.counts.shape == (shape[0], -(-shape[1] // 4))
    assert packed.overflowed.shape == (shape[0],) and not packed.overflowed.any()
    assert same_bits(packed.unpack(), g)
    assert packed.nbytes == 0
    assert packed.plain().compact() == packed.compact()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES_IN_WORDS)
def test_twell_uses_all_16_index_bits(dtype: torch.dtype, compact: bool) -> None:
    active = [0, 32767, 32768, 65534, 65535]
    g = torch.zeros(2, 65536, dtype=dtype)
    g[0, active] = torch.tensor([1, -1, 2, float("nan"), -3], dtype=dtype)
    packed = TwELL.pack(g, tile=65536, slots=5, compact=compact)
    assert packed.counts.dtype == torch.int32
    assert packed.entries()[1].tolist() == active
    assert same_bits(packed.unpack(), g)
    if not compact:
        assert packed.indices[0, 0].tolist() == [0, 32767, -32768, -2, -1]


def test_twell_counts_a_full_row_of_65536() -> None:
    packed = TwELL.pack(torch.ones(1, 65536), tile=65536, slots=1, overflow="mark")
    assert packed.counts.tolist() == [[65536]] and packed.overflowed.tolist() == [True]


def test_twell_words_take_any_number_of_columns_and_the_plain_form_16_bits_of_them() -> None:
    g = torch.zeros(1, 65537)
    g[0, 65536] = 1
    packed = TwELL.pack(g, compact=True)
    assert packed.columns.max() == 65536 and same_bits(packed.unpack(), g)
    for refused in (lambda: TwELL.pack(g), packed.plain):
        with pytest.raises(ValueError, match="the plain form needs F of at most 65536, got 65537; use the word form"):
            refused()
    with pytest.raises(ValueError, match="words need a tile of at most 65536, got 65537"):
        TwELL.pack(g, compact=True, tile=65537)


def test_twell_defaults() -> None:
    packed = TwELL.pack(torch.zeros(1, 300))
    assert (packed.tile, packed.slots, packed.words) == (128, 12, None)


# ---------------------------------------------------------------------------------------------------------
# TwELL: overflow
# ---------------------------------------------------------------------------------------------------------

TWELL_OVERFLOW = re.compile(
    r"row (?P<row>\d+), tile (?P<tile>\d+) \(columns (?P<low>\d+) to (?P<high>\d+)\) has (?P<count>\d+) active"
    r" elements, more than slots=(?P<slots>\d+); the smallest slots that fit are (?P<smallest>\d+)"
)


@given(matrices(), tiles, st.booleans())
def test_twell_overflow_error_names_the_place_and_the_smallest_slots(g: Tensor, tile: int, compact: bool) -> None:
    compact = compact and g.dtype in DTYPES_IN_WORDS
    smallest = longest_list(g, tile)
    assume(smallest >= 2)
    with pytest.raises(ValueError) as raised:
        TwELL.pack(g, tile=tile, slots=smallest - 1, compact=compact)
    said = {k: int(v) for k, v in TWELL_OVERFLOW.search(str(raised.value)).groupdict().items()}

    lists = active_by_tile(g, tile)
    row, at = next((m, t) for m, r in enumerate(lists) for t, cols in enumerate(r) if len(cols) > smallest - 1)
    assert (said["row"], said["tile"], said["count"]) == (row, at, len(lists[row][at]))
    assert (said["low"], said["high"]) == (at * tile, min((at + 1) * tile, g.shape[1]) - 1)
    assert (said["slots"], said["smallest"]) == (smallest - 1, smallest)
    assert same_bits(TwELL.pack(g, tile=tile, slots=smallest, compact=compact).unpack(), canonical(g))


def test_twell_overflow_error_names_slots_for_the_longest_list_not_the_first() -> None:
    g = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"row 0, tile 0 .* has 2 active .* smallest slots that fit are 4"):
        TwELL.pack(g, tile=4, slots=1)


@given(matrices(), tiles, st.integers(1, 6), st.booleans())
def test_twell_mark_marks_exactly_the_rows_that_do_not_fit(g: Tensor, tile: int, slots: int, compact: bool) -> None:
    compact = compact and g.dtype in DTYPES_IN_WORDS
    packed = TwELL.pack(g, tile=tile, slots=slots, compact=compact, overflow="mark")
    over = [any(len(cols) > slots for cols in row) for row in active_by_tile(g, tile)]
    assert packed.overflowed.dtype == torch.bool and packed.overflowed.tolist() == over

    kept = canonical(g)
    kept[torch.tensor(over, dtype=torch.bool)] = 0
    assert same_bits(packed.unpack(skip_overflowed=True), kept)
    if any(over):
        problem = rf"{sum(over)} rows overflowed \(first: row {over.index(True)}\)"
        with pytest.raises(ValueError, match=problem):
            packed.unpack()
        with pytest.raises(ValueError, match=problem):
            packed.entries()
    else:
        assert same_bits(packed.unpack(), kept)


# ---------------------------------------------------------------------------------------------------------
# Hybrid: packing and reading
# ---------------------------------------------------------------------------------------------------------

caps = st.sampled_from((0, 1, 2, 5, 20, 128))
backups = st.sampled_from((None, 0, 1, 3, 12))


def backup_rows_of(g: Tensor, backup: int | None) -> int:
    return -(-g.shape[0] // 8) if backup is None else backup


def pack_all(g: Tensor, cap: int) -> Hybrid:
    return Hybrid.pack(g, cap=cap, backup=g.shape[0])


@given(matrices(), caps)
def test_hybrid_round_trip_is_bit_exact(g: Tensor, cap: int) -> None:
    assert same_bits(pack_all(g, cap).unpack(), canonical(g))


@given(matrices(), caps, backups)
def test_hybrid_places_every_row_where_it_belongs(g: Tensor, cap: int, backup: int | None) -> None:
    h = Hybrid.pack(g, cap=cap, backup=backup, overflow="mark")
    lists = active_columns(g)
    n_backup = backup_rows_of(g, backup)
    long_rows = [m for m, cols in enumerate(lists) if len(cols) > cap]
    placed = long_rows[:n_backup]
    fitting = [cols if len(cols) <= cap else [] for cols in lists]
    g_bits = bits(g).tolist()

    assert h.cap == cap and h.shape == tuple(g.shape) and h.dtype == g.dtype
    assert h.counts.dtype == torch.int32 and h.counts.tolist() == [len(cols) for cols in lists]
    assert h.backup_rows.tolist() == placed + [-1] * (n_backup - len(placed))
    assert h.row_backup.tolist() == [placed.index(m) if m in placed else -1 for m in range(g.shape[0])]
    assert h.overflowed.tolist() == [m in long_rows[n_backup:] for m in range(g.shape[0])]
    assert h.columns.tolist() == [padded(cols, cap) for cols in fitting]
    assert bits(h.values).tolist() == [padded([g_bits[m][c] for c in cols], cap) for m, cols in enumerate(fitting)]
    assert same_bits(h.backup[: len(placed)], canonical(g)[placed])
    assert h.backup[len(placed) :].count_nonzero() == 0


@given(matrices(), caps, backups)
def test_hybrid_mark_leaves_exactly_the_overflowed_rows_out(g: Tensor, cap: int, backup: int | None) -> None:
    h = Hybrid.pack(g, cap=cap, backup=backup, overflow="mark")
    kept = canonical(g)
    kept[h.overflowed] = 0
    assert same_bits(h.unpack(skip_overflowed=True), kept)
    if h.overflowed.any():
        first = h.overflowed.tolist().index(True)
        problem = rf"Hybrid: {int(h.overflowed.sum())} rows overflowed \(first: row {first}\)"
        for read in (h.unpack, h.entries, h.transpose):
            with pytest.raises(ValueError, match=problem):
                read()
    else:
        assert same_bits(h.unpack(), kept)


@given(matrices(), caps)
def test_hybrid_entries_come_by_row_then_column(g: Tensor, cap: int) -> None:
    row, col, value = pack_all(g, cap).entries()
    expected = [(m, c) for m, cols in enumerate(active_columns(g)) for c in cols]
    assert list(zip(row.tolist(), col.tolist(), strict=True)) == expected
    assert same_bits(value, g[row, col])


@given(matrices(), caps, caps, backups)
def test_hybrid_transpose_is_the_packed_transpose(g: Tensor, cap: int, cap_t: int, backup_t: int | None) -> None:
    h = pack_all(g, cap)
    there = h.transpose(cap=cap_t, backup=backup_t, overflow="mark")
    assert there == Hybrid.pack(g.T, cap=cap_t, backup=backup_t, overflow="mark")
    there = h.transpose(cap=cap_t, backup=g.shape[1])
    assert there.transpose(cap=cap, backup=g.shape[0]) == h


def test_hybrid_defaults() -> None:
    h = Hybrid.pack(torch.zeros(17, 3))
    assert h.cap == 128 and h.backup.shape == (3, 3)
    t = h.transpose()
    assert t.cap == 128 and t.backup.shape == (1, 17)


def test_hybrid_indexes_a_long_transpose_with_32_bits() -> None:
    g = torch.zeros(70000, 4)
    g[torch.tensor([0, 3, 65535, 65536, 69999]), torch.tensor([1, 2, 2, 2, 2])] = torch.tensor([1.0, 2, 3, 4, 5])
    h = Hybrid.pack(g, cap=1, backup=0)
    assert h.indices.dtype == torch.int16
    t = h.transpose(cap=4, backup=1)
    assert t.indices.dtype == torch.int32 and t.shape == (4, 70000)
    assert t.columns.tolist() == [[0] * 4, [0] * 4, [3, 65535, 65536, 69999], [0] * 4]
    assert t == Hybrid.pack(g.T, cap=4, backup=1)
    assert t.transpose(cap=1, backup=0) == h


@pytest.mark.parametrize(("F", "index_dtype"), [(65536, torch.int16), (65537, torch.int32)])
def test_hybrid_index_dtype_changes_above_65536_columns(F: int, index_dtype: torch.dtype) -> None:
    g = torch.zeros(2, F)
    g[1, [0, 40000, F - 1]] = 1.0
    h = Hybrid.pack(g, cap=3, backup=0)
    assert h.indices.dtype == index_dtype
    assert h.columns.tolist() == [[0, 0, 0], [0, 40000, F - 1]]
    assert same_bits(h.unpack(), g)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0, 0)])
def test_hybrid_empty_matrices(shape: tuple[int, int]) -> None:
    g = torch.zeros(shape)
    h = Hybrid.pack(g, cap=2)
    assert same_bits(h.unpack(), g) and not h.overflowed.any()
    assert same_bits(h.transpose(cap=2).unpack(), g.T)


def test_hybrid_without_ell_part_keeps_every_active_row_in_the_backup() -> None:
    g = torch.tensor([[0.0, 0], [1, 0], [0, 2]])
    h = Hybrid.pack(g, cap=0, backup=2)
    assert h.values.shape == (3, 0) and h.backup_rows.tolist() == [1, 2] and h.row_backup.tolist() == [-1, 0, 1]
    assert same_bits(h.unpack(), g)
    with pytest.raises(ValueError, match="smallest backup that fits is 2, or with this backup the smallest cap 1"):
        Hybrid.pack(g, cap=0, backup=1)


def test_hybrid_without_backup_marks_every_long_row() -> None:
    g = torch.tensor([[1.0, 1], [1, 0], [2, 2]])
    h = Hybrid.pack(g, cap=1, backup=0, overflow="mark")
    assert h.backup.shape == (0, 2) and h.overflowed.tolist() == [True, False, True]
    assert h.counts.tolist() == [2, 1, 2]
    assert h.values.tolist() == [[0], [1], [0]]
    assert same_bits(Hybrid.pack(g, cap=2, backup=0).unpack(), g)


HYBRID_OVERFLOW = re.compile(
    r"row (?P<row>\d+) has (?P<count>\d+) active elements, more than cap=(?P<cap>\d+).* (?P<over>\d+) rows are over"
    r".*backup=(?P<backup>\d+);.*smallest backup that fits is (?P<rows>\d+),.*smallest cap (?P<smallest_cap>\d+)"
)


@given(matrices(), caps, backups)
def test_hybrid_overflow_error_names_the_smallest_backup_and_cap(g: Tensor, cap: int, backup: int | None) -> None:
    n_backup = backup_rows_of(g, backup)
    counts = [len(cols) for cols in active_columns(g)]
    long_rows = [m for m, n in enumerate(counts) if n > cap]
    assume(len(long_rows) > n_backup)
    with pytest.raises(ValueError) as raised:
        Hybrid.pack(g, cap=cap, backup=backup)
    said = {k: int(v) for k, v in HYBRID_OVERFLOW.search(str(raised.value)).groupdict().items()}

    assert (said["row"], said["count"]) == (long_rows[n_backup], counts[long_rows[n_backup]])
    assert (said["cap"], said["over"], said["backup"]) == (cap, len(long_rows), n_backup)
    assert same_bits(Hybrid.pack(g, cap=cap, backup=said["rows"]).unpack(), canonical(g))
    assert same_bits(Hybrid.pack(g, cap=said["smallest_cap"], backup=n_backup).unpack(), canonical(g))
    with pytest.raises(ValueError, match="finds no backup row"):
        Hybrid.pack(g, cap=cap, backup=said["rows"] - 1)
    with pytest.raises(ValueError, match="finds no backup row"):
        Hybrid.pack(g, cap=said["smallest_cap"] - 1, backup=n_backup)


def test_hybrid_transpose_raises_or_marks_what_does_not_fit() -> None:
    h = Hybrid.pack(torch.tensor([[1.0, 0], [2, 0], [3, 4]]), cap=2, backup=0)
    with pytest.raises(ValueError, match="row 0 has 3 active elements, more than cap=1"):
        h.transpose(cap=1, backup=0)
    assert h.transpose(cap=1, backup=0, overflow="mark").overflowed.tolist() == [True, False]


# ---------------------------------------------------------------------------------------------------------
# Both: equality, bytes, names
# ---------------------------------------------------------------------------------------------------------

FORMS = {
    "plain": lambda g: TwELL.pack(g, tile=3, slots=2),
    "words": lambda g: TwELL.pack(g, tile=3, slots=2, compact=True),
    "hybrid": lambda g: Hybrid.pack(g, cap=1, backup=2),
}
each_form = pytest.mark.parametrize("pack", FORMS.values(), ids=FORMS)


@each_form
@pytest.mark.parametrize("at", [(0, 1), (0, 5), (1, 3)])
def test_equality_sees_a_single_bit(pack, at: tuple[int, int]) -> None:
    g = sample(torch.bfloat16)
    assert pack(g) == pack(g.clone())
    assert pack(g) != pack(flipped(g, at))
    assert not pack(g) == pack(flipped(g, at))  # noqa: SIM201 (both operators are under test)


@each_form
def test_equality_takes_nan_for_itself_but_not_for_another_nan(pack) -> None:
    g = edited(sample(torch.bfloat16), (0, 4), float("nan"))
    assert pack(g) == pack(g.clone())
    assert pack(g) != pack(flipped(g, (0, 4)))


@each_form
def test_equality_sees_a_moved_entry(pack) -> None:
    g = sample(torch.bfloat16)
    moved = edited(edited(g, (0, 1), 0), (0, 2), 5)
    assert pack(g) != pack(moved)


def test_equality_sees_parameters_shape_dtype_and_form() -> None:
    g = torch.zeros(2, 6, dtype=torch.bfloat16)
    base = TwELL.pack(g, tile=6, slots=2)
    assert base != TwELL.pack(g, tile=7, slots=2)
    assert base != TwELL.pack(g, tile=6, slots=3)
    assert base != TwELL.pack(g[:, :5], tile=6, slots=2)
    assert base != TwELL.pack(g[:1], tile=6, slots=2)
    assert base != TwELL.pack(g.half(), tile=6, slots=2)
    assert base != TwELL.pack(g, tile=6, slots=2, compact=True)
    two, three = (TwELL.pack(torch.tensor([[1.0, 1, z]]), tile=3, slots=1, overflow="mark") for z in (0, 1))
    assert two != three  # their rows hold nothing, but the counts differ
    hybrid = Hybrid.pack(g, cap=2, backup=1)
    assert hybrid != Hybrid.pack(g, cap=3, backup=1) and hybrid != Hybrid.pack(g, cap=2, backup=2)
    assert hybrid != Hybrid.pack(g.half(), cap=2, backup=1)
    assert base != hybrid and hybrid != base and base != "TwELL" and hybrid != 0


@each_form
def test_forms_are_frozen_and_unhashable(pack) -> None:
    form = pack(sample(torch.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        form.shape = (1, 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(form)


@each_form
def test_to_keeps_everything(pack) -> None:
    form = pack(sample(torch.bfloat16))
    assert form.to("cpu") == form and form.to(torch.device("cpu")).device == form.device == torch.device("cpu")


@each_form
def test_packing_leaves_its_input_alone(pack) -> None:
    g = edited(sample(torch.bfloat16), (1, 0), -0.0)
    before = g.clone()
    pack(g)
    assert same_bits(g, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nbytes_counts_what_is_stored(dtype: torch.dtype) -> None:
    g, size = torch.zeros(5, 10, dtype=dtype), dtype.itemsize
    assert TwELL.pack(g, tile=4, slots=3).nbytes == 5 * 3 * (3 * (size + 2) + 1)
    assert TwELL.pack(g, tile=256, slots=3).nbytes == 5 * (3 * (size + 2) + 4)
    assert Hybrid.pack(g, cap=3, backup=2).nbytes == 5 * 3 * (size + 2) + 5 * 4 + 2 * 10 * size + 2 * 4 + 5 * 4
    if dtype in DTYPES_IN_WORDS:
        assert TwELL.pack(g, tile=4, slots=3, compact=True).nbytes == 5 * 3 * (3 * 2 * size + 1)


def test_repr_says_shape_parameters_and_overflow() -> None:
    g, g16 = sample(), sample(torch.bfloat16)
    assert repr(TwELL.pack(g, tile=3, slots=2)) == "TwELL(2 x 6, tile=3, slots=2, float32, plain, 4 active, 52 bytes)"
    assert (
        repr(TwELL.pack(g16, tile=3, slots=1, compact=True, overflow="mark"))
        == "TwELL(2 x 6, tile=3, slots=1, bfloat16, words, 4 active, 1 rows overflowed, 20 bytes)"
    )
    assert (
        repr(Hybrid.pack(g, cap=1, backup=2)) == "Hybrid(2 x 6, cap=1, 1 of 2 backup rows, float32, 4 active, 84 bytes)"
    )
    assert (
        repr(Hybrid.pack(g, cap=1, backup=0, overflow="mark"))
        == "Hybrid(2 x 6, cap=1, 0 of 0 backup rows, float32, 4 active, 1 rows overflowed, 28 bytes)"
    )


# ---------------------------------------------------------------------------------------------------------
# Invariants: a valid form, one field corrupted
# ---------------------------------------------------------------------------------------------------------


def plain_form() -> TwELL:
    """counts [[1, 2], [0, 1]], columns [[[1, -], [4, 5]], [[-, -], [3, -]]]."""
    return TwELL.pack(sample(), tile=3, slots=2)


PLAIN_CORRUPTIONS = {
    "counts is a list": (lambda t: {"counts": t.counts.tolist()}, "counts must be a tensor, got list"),
    "counts shape": (lambda t: {"counts": t.counts[:, :1]}, r"counts must have shape \(2, 2\), got \(2, 1\)"),
    "counts dtype": (lambda t: {"counts": t.counts.long()}, "counts must be int32, or uint8 .*got torch.int64"),
    "counts too narrow": (
        lambda t: {"tile": 256, "counts": t.counts[:, :1], "values": t.values[:, :1], "indices": t.indices[:, :1]},
        "counts must be int32, or uint8 if tile <= 255, got torch.uint8 for tile=256",
    ),
    "values missing": (lambda t: {"values": None}, "values must be a tensor, got NoneType"),
    "values shape": (lambda t: {"values": t.values[..., :1]}, r"values must have shape \(2, 2, 2\)"),
    "values dtype": (lambda t: {"values": t.values.double()}, "values must be torch.float32"),
    "dtype": (lambda t: {"dtype": torch.float64}, "values must be torch.float64, got torch.float32"),
    "indices missing": (lambda t: {"indices": None}, "indices must be a tensor"),
    "indices shape": (lambda t: {"indices": t.indices[:1]}, r"indices must have shape \(2, 2, 2\)"),
    "indices dtype": (lambda t: {"indices": t.indices.int()}, "indices must be torch.int16, got torch.int32"),
    "words besides values": (lambda t: {"words": torch.zeros(2, 2, 2, dtype=torch.int64)}, "not both"),
    "tile": (lambda t: {"tile": 2}, r"counts must have shape \(2, 3\)"),
    "tile 0": (lambda t: {"tile": 0}, "tile must be at least 1, got 0"),
    "slots": (lambda t: {"slots": 3}, r"values must have shape \(2, 2, 3\)"),
    "slots 0": (lambda t: {"slots": 0}, "slots must be at least 1, got 0"),
    "M": (lambda t: {"shape": (3, 6)}, r"counts must have shape \(3, 2\)"),
    "M negative": (lambda t: {"shape": (-1, 6)}, "M must not be negative"),
    "F": (lambda t: {"shape": (2, 7)}, r"counts must have shape \(2, 3\)"),
    "F negative": (lambda t: {"shape": (2, -1)}, "F must not be negative, got -1"),
    "F too large": (
        lambda t: {"shape": (2, 65537), "tile": 65536},
        "the plain form needs F of at most 65536, got 65537",
    ),
    "devices": (lambda t: {"values": t.values.to("meta")}, "tensors lie on different devices: cpu, meta"),
    "count above the tile": (
        lambda t: {"counts": edited(t.counts, (0, 1), 4)},
        "row 0, tile 1 has count 4, expected 0 to 3",
    ),
    "count above the columns left": (
        lambda t: {"shape": (2, 5), "counts": edited(t.counts, (1, 1), 3)},
        "row 1, tile 1 has count 3, expected 0 to 2",
    ),
    "count negative": (
        lambda t: {"counts": edited(t.counts.int(), (1, 0), -1)},
        "row 1, tile 0 has count -1, expected 0 to 3",
    ),
    "count too small": (
        lambda t: {"counts": edited(t.counts, (0, 1), 1)},
        r"an unused slot is not zero, first at \[0, 1, 1\]",
    ),
    "count too large": (
        lambda t: {"counts": edited(t.counts, (0, 0), 2)},
        r"a stored value is zero, first at \[0, 0, 1\]",
    ),
    "zero stored": (lambda t: {"values": edited(t.values, (1, 1, 0), 0)}, r"a stored value is zero.*\[1, 1, 0\]"),
    "-0.0 stored": (lambda t: {"values": edited(t.values, (0, 1, 1), -0.0)}, r"a stored value is zero.*\[0, 1, 1\]"),
    "indices descend": (
        lambda t: {"indices": swapped(t.indices, (0, 1, 0), (0, 1, 1))},
        r"do not ascend, first at \[0, 1, 0\]",
    ),
    "index twice": (lambda t: {"indices": edited(t.indices, (0, 1, 1), 4)}, r"do not ascend, first at \[0, 1, 0\]"),
    "index before its tile": (
        lambda t: {"indices": edited(t.indices, (0, 1, 0), 2)},
        r"outside its range, first at \[0, 1, 0\]",
    ),
    "index behind its tile": (
        lambda t: {"indices": edited(t.indices, (0, 0, 0), 3)},
        r"outside its range, first at \[0, 0, 0\]",
    ),
    "index behind the columns": (lambda t: {"shape": (2, 5)}, r"outside its range, first at \[0, 1, 1\]"),
    "index negative": (lambda t: {"indices": edited(t.indices, (1, 1, 0), -1)}, "outside its range"),
    "value in an unused slot": (lambda t: {"values": edited(t.values, (1, 0, 1), 9)}, "unused slot is not zero"),
    "NaN in an unused slot": (
        lambda t: {"values": edited(t.values, (0, 0, 1), float("nan"))},
        r"unused slot is not zero, first at \[0, 0, 1\]",
    ),
    "index in an unused slot": (lambda t: {"indices": edited(t.indices, (0, 0, 1), 2)}, "unused slot is not zero"),
}


@pytest.mark.parametrize(("changes", "problem"), PLAIN_CORRUPTIONS.values(), ids=PLAIN_CORRUPTIONS)
def test_twell_plain_refuses_a_corrupted_field(changes, problem: str) -> None:
    form = plain_form()
    with pytest.raises(ValueError, match=f"TwELL: .*{problem}"):
        dataclasses.replace(form, **changes(form))


def word_form() -> TwELL:
    """Words of both rows: [5|1, -], [6|1, 7|2] and [-, -], [8|0, -]."""
    return TwELL.pack(sample(torch.float16), tile=3, slots=2, compact=True)


def word(value: float, column: int) -> int:
    return int(torch.tensor(value, dtype=torch.float16).view(torch.int16)) << 16 | column


WORD_CORRUPTIONS = {
    "words shape": (lambda t: {"words": t.words[:, :1]}, r"words must have shape \(2, 2, 2\), got \(2, 1, 2\)"),
    "words dtype": (lambda t: {"words": t.words.long()}, "words must be torch.int32, got torch.int64"),
    "words of another dtype": (lambda t: {"dtype": torch.float32}, "words must be torch.int64, got torch.int32"),
    "words is a list": (lambda t: {"words": t.words.tolist()}, "words must be a tensor, got list"),
    "dtype": (lambda t: {"dtype": torch.float64}, "words hold values of bfloat16, float16, float32, got torch.float64"),
    "slots": (lambda t: {"slots": 3}, r"words must have shape \(2, 2, 3\)"),
    "values besides words": (lambda t: {"values": torch.zeros(2, 2, 2).half()}, "not both"),
    "indices besides words": (lambda t: {"indices": torch.zeros(2, 2, 2, dtype=torch.int16)}, "not both"),
    "devices": (lambda t: {"words": t.words.to("meta")}, "tensors lie on different devices: cpu, meta"),
    "count above the tile": (
        lambda t: {"counts": edited(t.counts, (0, 1), 4)},
        "row 0, tile 1 has count 4, expected 0 to 3",
    ),
    "count too large": (lambda t: {"counts": edited(t.counts, (0, 0), 2)}, "a stored value is zero"),
    "zero stored": (lambda t: {"words": edited(t.words, (0, 0, 0), word(0, 1))}, "a stored value is zero"),
    "column twice": (
        lambda t: {"words": edited(t.words, (0, 1, 1), word(7, 1))},
        r"indices repeat or do not ascend, first at \[0, 1, 0\]",
    ),
    "column outside its tile": (
        lambda t: {"words": edited(t.words, (0, 0, 0), word(5, 3))},
        r"outside its range, first at \[0, 0, 0\]",
    ),
    "column behind the columns": (lambda t: {"shape": (2, 5)}, r"outside its range, first at \[0, 1, 1\]"),
    "column with its top bit set": (
        lambda t: {"words": edited(t.words, (0, 0, 0), word(5, 0x8001))},
        "outside its range",
    ),
}


@pytest.mark.parametrize(("changes", "problem"), WORD_CORRUPTIONS.values(), ids=WORD_CORRUPTIONS)
def test_twell_words_refuse_a_corrupted_field(changes, problem: str) -> None:
    form = word_form()
    with pytest.raises(ValueError, match=f"TwELL: .*{problem}"):
        dataclasses.replace(form, **changes(form))


def test_hybrid_keeps_no_entries_of_an_overflowed_row() -> None:
    form = Hybrid.pack(torch.ones(2, 3), cap=2, backup=1, overflow="mark")
    assert form.overflowed.tolist() == [False, True]
    with pytest.raises(ValueError, match=r"an unused slot is not zero, first at \[1, 0\]"):
        dataclasses.replace(form, values=edited(form.values, (1, 0), 1))


def test_twell_refuses_negative_zero_in_an_unused_slot_and_integer_values() -> None:
    form = TwELL.pack(torch.tensor([[0.0, 5.0, 0.0]]), tile=3, slots=2)
    with pytest.raises(ValueError, match=r"an unused slot is not zero, first at \[0, 0, 1\]"):
        dataclasses.replace(form, values=edited(form.values, (0, 0, 1), -0.0))
    with pytest.raises(ValueError, match="values must be floating-point"):
        dataclasses.replace(form, values=form.values.int(), dtype=torch.int32)


def hybrid_form() -> Hybrid:
    """counts [3, 1, 3, 2], cap 2: rows 0 and 2 in backup rows 0 and 1; backup row 2 is free."""
    g = torch.tensor([[1.0, 2, 3, 0], [0, 4, 0, 0], [0, 5, 6, 7], [0, 8, 0, 9]])
    return Hybrid.pack(g, cap=2, backup=3)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


HYBRID_CORRUPTIONS = {
    "values is a list": (lambda h: {"values": h.values.tolist()}, "values must be a tensor, got list"),
    "values shape": (lambda h: {"values": h.values[:3]}, r"values must have shape \(4, 2\), got \(3, 2\)"),
    "values not a matrix": (lambda h: {"values": h.values.flatten()}, r"values must have shape \(4, 0\), got \(8,\)"),
    "values dtype": (lambda h: {"values": h.values.half()}, "backup must be torch.float16, got torch.float32"),
    "indices shape": (lambda h: {"indices": h.indices[:, :1]}, r"indices must have shape \(4, 2\)"),
    "indices dtype": (lambda h: {"indices": h.indices.int()}, "indices must be torch.int16, got torch.int32"),
    "indices too narrow": (
        lambda h: {"shape": (4, 65537), "backup": torch.zeros(3, 65537)},
        "indices must be torch.int32, got torch.int16",
    ),
    "counts shape": (lambda h: {"counts": h.counts[:3]}, r"counts must have shape \(4,\)"),
    "counts dtype": (lambda h: {"counts": h.counts.long()}, "counts must be torch.int32"),
    "backup shape": (lambda h: {"backup": h.backup[:, :3]}, r"backup must have shape \(3, 4\)"),
    "backup dtype": (lambda h: {"backup": h.backup.double()}, "backup must be torch.float32, got torch.float64"),
    "backup rows of another backup": (lambda h: {"backup_rows": int32(0, 2)}, r"backup must have shape \(2, 4\)"),
    "backup_rows dtype": (lambda h: {"backup_rows": h.backup_rows.long()}, "backup_rows must be torch.int32"),
    "backup_rows is a list": (lambda h: {"backup_rows": [], "backup": h.backup[:0]}, "backup_rows must be a tensor"),
    "row_backup shape": (lambda h: {"row_backup": h.row_backup[:3]}, r"row_backup must have shape \(4,\)"),
    "row_backup dtype": (lambda h: {"row_backup": h.row_backup.long()}, "row_backup must be torch.int32"),
    "M": (lambda h: {"shape": (5, 4)}, r"values must have shape \(5, 2\)"),
    "M negative": (lambda h: {"shape": (-4, 4)}, "shape must not be negative"),
    "F negative": (lambda h: {"shape": (4, -4)}, "shape must not be negative"),
    "devices": (lambda h: {"counts": h.counts.to("meta")}, "tensors lie on different devices: cpu, meta"),
    "count above F": (lambda h: {"counts": int32(3, 1, 5, 2)}, "row 2 has count 5, expected 0 to 4"),
    "count negative": (lambda h: {"counts": int32(3, -1, 3, 2)}, "row 1 has count -1, expected 0 to 4"),
    "count too small": (lambda h: {"counts": int32(3, 0, 3, 2)}, r"an unused slot is not zero, first at \[1, 0\]"),
    "count too large": (lambda h: {"counts": int32(3, 2, 3, 2)}, r"a stored value is zero, first at \[1, 1\]"),
    "count of a backup row": (
        lambda h: {"counts": int32(3, 1, 4, 2)},
        "backup row 1 has 3 active elements, counts say 4",
    ),
    "count over the cap without a backup row": (
        lambda h: {"counts": int32(3, 1, 3, 3)},
        r"backup_rows\[2\] must be 3, got -1",
    ),
    "backup rows out of order": (
        lambda h: {
            "backup_rows": int32(2, 0, -1),
            "row_backup": int32(1, -1, 0, -1),
            "backup": h.backup[torch.tensor([1, 0, 2])],
        },
        r"backup_rows\[0\] must be 0, got 2",
    ),
    "negative zero in a free backup row": (lambda h: {"backup": edited(h.backup, (2, 3), -0.0)}, "holds -0.0"),
    "negative zero in an unused slot": (lambda h: {"values": edited(h.values, (1, 1), -0.0)}, r"unused slot.*\[1, 1\]"),
    "backup_rows a scalar": (lambda h: {"backup_rows": int32(0)[0], "backup": h.backup[:1]}, "backup_rows must have"),
    "values are integers": (lambda h: {"values": h.values.int(), "backup": h.backup.int()}, "must be floating-point"),
    "element lost from the backup": (
        lambda h: {"backup": edited(h.backup, (0, 1), 0)},
        "backup row 0 has 2 active elements, counts say 3",
    ),
    "garbage in a free backup row": (
        lambda h: {"backup": edited(h.backup, (2, 3), float("nan"))},
        "backup row 2 has 1 active elements, counts say 0",
    ),
    "row_backup too large": (lambda h: {"row_backup": int32(0, -1, 3, -1)}, r"row_backup\[2\] must be 1, got 3"),
    "row_backup too small": (lambda h: {"row_backup": int32(0, -2, 1, -1)}, r"row_backup\[1\] must be -1, got -2"),
    "backup_rows too large": (lambda h: {"backup_rows": int32(0, 4, -1)}, r"backup_rows\[1\] must be 2, got 4"),
    "backup_rows too small": (lambda h: {"backup_rows": int32(0, 2, -2)}, r"backup_rows\[2\] must be -1, got -2"),
    "maps crossed": (lambda h: {"row_backup": int32(1, -1, 0, -1)}, r"row_backup\[0\] must be 0, got 1"),
    "map to a free backup row": (lambda h: {"row_backup": int32(0, -1, 2, -1)}, r"row_backup\[2\] must be 1, got 2"),
    "row forgets its backup": (lambda h: {"row_backup": int32(0, -1, -1, -1)}, r"row_backup\[2\] must be 1, got -1"),
    "backup forgets its row": (lambda h: {"backup_rows": int32(0, -1, -1)}, r"backup_rows\[1\] must be 2, got -1"),
    "one row, two backups": (lambda h: {"backup_rows": int32(0, 2, 2)}, r"backup_rows\[2\] must be -1, got 2"),
    "two rows, one backup": (lambda h: {"row_backup": int32(0, 1, 1, -1)}, r"row_backup\[1\] must be -1, got 1"),
    "backup for a row that fits": (
        lambda h: {"row_backup": int32(0, 2, 1, -1), "backup_rows": int32(0, 2, 1)},
        r"backup_rows\[2\] must be -1, got 1",
    ),
    "backup rows in another row's place": (
        lambda h: {"counts": int32(4, 1, 3, 2), "backup": edited(h.backup, (1, 0), 1)},
        "backup row 0 has 3 active elements, counts say 4",
    ),
    "zero stored": (lambda h: {"values": edited(h.values, (3, 1), 0)}, r"a stored value is zero, first at \[3, 1\]"),
    "indices descend": (lambda h: {"indices": swapped(h.indices, (3, 0), (3, 1))}, r"do not ascend.*\[3, 0\]"),
    "index twice": (lambda h: {"indices": edited(h.indices, (3, 1), 1)}, r"do not ascend, first at \[3, 0\]"),
    "index behind the columns": (lambda h: {"indices": edited(h.indices, (1, 0), 4)}, r"outside its range.*\[1, 0\]"),
    "index negative": (lambda h: {"indices": edited(h.indices, (1, 0), -1)}, "outside its range"),
    "value in an unused slot": (lambda h: {"values": edited(h.values, (1, 1), 9)}, r"unused slot.*\[1, 1\]"),
    "index in an unused slot": (lambda h: {"indices": edited(h.indices, (1, 1), 3)}, r"unused slot.*\[1, 1\]"),
    "entry in the lists of a backup row": (lambda h: {"values": edited(h.values, (0, 0), 1)}, r"unused slot.*\[0, 0\]"),
}


@pytest.mark.parametrize(("changes", "problem"), HYBRID_CORRUPTIONS.values(), ids=HYBRID_CORRUPTIONS)
def test_hybrid_refuses_a_corrupted_field(changes, problem: str) -> None:
    form = hybrid_form()
    with pytest.raises(ValueError, match=f"Hybrid: .*{problem}"):
        dataclasses.replace(form, **changes(form))


@pytest.mark.parametrize("make", [plain_form, word_form, hybrid_form])
def test_forms_survive_a_copy_of_their_fields(make) -> None:
    assert dataclasses.replace(make()) == make()


# ---------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [TwELL.pack, Hybrid.pack], ids=["TwELL", "Hybrid"])
@pytest.mark.parametrize(
    ("g", "problem"),
    [
        (torch.zeros(3), r"expected a matrix \[M, F\], got shape \(3,\)"),
        (torch.zeros(1, 2, 3), r"expected a matrix \[M, F\], got shape \(1, 2, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int32), "expected a floating-point matrix, got torch.int32"),
        (torch.zeros(2, 3, dtype=torch.bool), "expected a floating-point matrix, got torch.bool"),
        (torch.eye(3).to_sparse(), "expected a dense matrix, got layout torch.sparse_coo"),
        ([[1.0, 2.0]], "expected a tensor, got list"),
    ],
    ids=["1-D", "3-D", "int", "bool", "sparse", "list"],
)
def test_pack_refuses_what_is_no_dense_float_matrix(pack, g: Tensor, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"(TwELL|Hybrid)\.pack: {problem}"):
        pack(g)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"tile": 0}, "tile must be at least 1, got 0"),
        ({"tile": -3}, "tile must be at least 1, got -3"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"overflow": "clip"}, "overflow must be 'error' or 'mark', got 'clip'"),
    ],
)
def test_twell_pack_refuses_bad_options(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TwELL.pack(torch.zeros(2, 3), **options)


def test_twell_words_refuse_values_of_64_bits() -> None:
    g = torch.zeros(2, 3, dtype=torch.float64)
    for refused in (lambda: TwELL.pack(g, compact=True), TwELL.pack(g).compact):
        with pytest.raises(ValueError, match=r"words hold values of .*, got torch.float64; use the plain form"):
            refused()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cap": -1}, "cap must not be negative, got -1"),
        ({"backup": -1}, "backup must not be negative, got -1"),
        ({"overflow": "drop"}, "overflow must be 'error' or 'mark', got 'drop'"),
    ],
)
def test_hybrid_pack_and_transpose_refuse_bad_options(options: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Hybrid.pack(torch.zeros(2, 3), **options)
    with pytest.raises(ValueError, match=problem):
        Hybrid.pack(torch.zeros(2, 3)).transpose(**options)
