import pytest
import torch
from torch import Tensor

from pw_pipelines.codebook import Codebook, fit_codebook, weighted_error

BF16 = torch.bfloat16


def gaussian(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Weights as models have them, and input moments with a few very busy columns."""
    return 0.05 * torch.randn(rows, cols).bfloat16().float(), torch.randn(1, cols).exp().square()


def unrounded(book: Codebook, bits: int) -> Tensor:
    codes = book.codes >> (max(book.luts) - bits)
    return book.centroids[bits].gather(1, codes.long())


def exact_error(rows: Tensor, weights: Tensor, clusters: int) -> Tensor:
    """Least weighted squared error of any partition, by dynamic programming."""
    x, order = rows.double().sort(1)
    w = weights.double().expand(rows.shape).gather(1, order)
    zero = torch.zeros(len(x), 1, dtype=torch.float64)
    mass, first, second = (
        torch.cat([zero, (w * x**power).cumsum(1)], 1) for power in range(3)
    )  # fmt: skip
    m, f, s = (t[:, None, :] - t[:, :, None] for t in (mass, first, second))
    cost = (s - f.square() / m.clamp_min(1e-300)).masked_fill(
        ~torch.ones_like(m[0]).triu().bool(), torch.inf
    )
    best = cost[:, 0]
    for _ in range(clusters - 1):
        best = (best[:, :, None] + cost).amin(1)
    return best[:, -1]


@pytest.mark.parametrize(("bits", "mean_excess"), [(2, 0.002), (3, 0.01)])
def test_seed_is_close_to_the_best_partition(bits: int, mean_excess: float) -> None:
    rows, weights = gaussian(150, 160)
    book = fit_codebook(rows, weights, bits, bits, BF16)
    error = weighted_error(rows, weights, unrounded(book, bits))
    excess = error / exact_error(rows, weights, 1 << bits) - 1
    assert excess.min() > -1e-9
    assert excess.mean() < mean_excess


def test_each_split_is_the_best_of_its_interval() -> None:
    rows, weights = gaussian(6, 24)
    book = fit_codebook(rows, weights, 2, 3, BF16)
    for row in range(6):
        coarse, fine = book.codes[row] >> 1, book.codes[row]
        for cluster in range(4):
            member = coarse == cluster
            x, w = rows[row : row + 1, member], weights[:, member]
            found = fine[member] & 1
            error = sum(
                exact_error(x[:, found == h], w[:, found == h], 1)
                for h in (0, 1)
                if (found == h).any()
            )
            torch.testing.assert_close(error, exact_error(x, w, 2), rtol=1e-9, atol=1e-12)


def test_narrow_codes_are_prefixes_of_wide_ones() -> None:
    rows, weights = gaussian(40, 96)
    wide = fit_codebook(rows, weights, 2, 8, BF16)
    for bits in range(2, 8):
        narrow = fit_codebook(rows, weights, 2, bits, BF16)
        assert torch.equal(narrow.codes, wide.codes >> (8 - bits))
        assert torch.equal(narrow.luts[bits], wide.luts[bits])


@pytest.mark.parametrize("cols", [1, 3, 5, 96])
def test_tables_ascend_and_codes_follow_the_order_of_the_row(cols: int) -> None:
    rows, weights = gaussian(30, cols)
    rows[:10] = rows[:10].mul(8).round()  # many equal weights
    book = fit_codebook(rows, weights, 2, 6, BF16)
    order = rows.argsort(dim=1, stable=True)
    for bits, lut in book.luts.items():
        assert lut.shape == (30, 1 << bits)
        assert (lut.float().diff(dim=1) >= 0).all()
        ordered = (book.codes >> (6 - bits)).gather(1, order).int()
        assert (ordered.diff(dim=1) >= 0).all()


def test_error_never_rises_with_the_width() -> None:
    rows, weights = gaussian(200, 96)
    rows[0] = 0.25
    weights = weights.expand(200, -1) * torch.rand(200, 1)
    book = fit_codebook(rows, weights, 2, 8, BF16)
    errors = torch.stack([weighted_error(rows, weights, unrounded(book, b)) for b in range(2, 9)])
    assert (errors.diff(dim=0) <= 0).all()


def test_entries_are_weighted_means_of_their_members() -> None:
    rows, weights = gaussian(20, 64)
    book = fit_codebook(rows, weights, 2, 4, torch.float16)
    for bits, lut in book.luts.items():
        one_hot = torch.nn.functional.one_hot((book.codes >> (4 - bits)).long(), 1 << bits).double()
        mass = (weights.double()[..., None] * one_hot).sum(1)
        mean = (weights.double()[..., None] * rows.double()[..., None] * one_hot).sum(1) / mass
        full = mass > 0
        torch.testing.assert_close(book.centroids[bits][full], mean[full], rtol=1e-9, atol=1e-15)
        assert torch.equal(lut, book.centroids[bits].half())


def test_constant_rows_and_rows_with_few_values_are_exact() -> None:
    rows = torch.tensor([[0.5] * 12, [-0.0] * 12, [1.0, -2.0, 3.0] * 4])
    book = fit_codebook(rows, torch.rand(1, 12) + 0.1, 2, 5, BF16)
    for bits in range(2, 6):
        assert torch.equal(book.dequantize(bits).float(), rows)


def test_columns_without_input_do_not_spoil_a_row() -> None:
    rows, weights = gaussian(8, 64)
    weights[:, :32] = 0
    book = fit_codebook(rows, weights, 2, 6, BF16)
    assert torch.isfinite(book.centroids[2]).all()
    uniform = fit_codebook(rows, torch.ones(1, 64), 2, 6, BF16)
    none = fit_codebook(rows, torch.zeros(1, 64), 2, 6, BF16)
    assert torch.equal(none.codes, uniform.codes)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    rows, weights = gaussian(1100, 256)  # more than one chunk
    whole = fit_codebook(rows, weights, 2, 4, BF16)
    part = fit_codebook(rows[1000:], weights, 2, 4, BF16)
    assert torch.equal(whole.codes[1000:], part.codes)
    assert torch.equal(whole.luts[4][1000:], part.luts[4])


def test_bad_input_is_refused() -> None:
    rows, weights = gaussian(2, 8)
    with pytest.raises(ValueError, match="do not fit"):
        fit_codebook(rows, weights[:, :4], 2, 4, BF16)
    with pytest.raises(ValueError, match="widths must satisfy"):
        fit_codebook(rows, weights, 5, 4, BF16)
    with pytest.raises(ValueError, match="finite"):
        fit_codebook(rows.index_fill(1, torch.tensor([3]), torch.nan), weights, 2, 4, BF16)
