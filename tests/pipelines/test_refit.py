import pytest
import torch
from torch import Tensor

from pw_pipelines import refit as module
from pw_pipelines.codebook import Codebook, fit_codebook
from pw_pipelines.refit import damped, refit

BF16 = torch.bfloat16
WIDTHS = range(2, 6)


def correlated(blocks: int, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Weights [E, N, K], and second moments [E, K, K] of inputs with a mean and a few directions
    in which they mostly vary.
    """
    weights = 0.05 * torch.randn(blocks, rows, cols).bfloat16().float()
    directions = torch.randn(blocks, 4, cols)
    inputs = torch.randn(blocks, 500, 4) @ directions + 0.3 * torch.randn(blocks, 500, cols) + 0.5
    return weights, inputs.transpose(1, 2) @ inputs


def start(weights: Tensor, hessians: Tensor) -> Codebook:
    """The k-means that a refit begins with."""
    moments = hessians.diagonal(dim1=1, dim2=2).repeat_interleave(weights.shape[1], 0)
    return fit_codebook(weights.flatten(0, 1), moments, WIDTHS[0], WIDTHS[-1], BF16)


def errors(book: Codebook, weights: Tensor, hessians: Tensor, bits: int) -> Tensor:
    """Error [E] of the unrounded tables, in the damped metric."""
    levels = book.centroids[bits].gather(1, (book.codes >> (WIDTHS[-1] - bits)).long())
    gap = weights - levels.float().view(weights.shape)
    return (torch.bmm(gap, damped(hessians)) * gap).sum((1, 2))


def test_every_width_gains_where_inputs_are_correlated() -> None:
    weights, hessians = correlated(2, 40, 64)
    book = start(weights, hessians)
    fitted = refit(book, weights, hessians)
    for bits in WIDTHS:
        before, after = (errors(b, weights, hessians, bits) for b in (book, fitted.book))
        torch.testing.assert_close(fitted.before[bits], before, rtol=1e-3, atol=0)
        torch.testing.assert_close(fitted.after[bits], after, rtol=1e-3, atol=0)
        assert (after < 0.6 * before).all(), bits
    assert fitted.book.luts[3].dtype == BF16
    assert fitted.book.codes.shape == (80, 64)


def test_widths_of_no_importance_pay_for_the_others() -> None:
    weights, hessians = correlated(1, 40, 64)
    book = start(weights, hessians)
    all_widths = refit(book, weights, hessians)
    narrowest = refit(book, weights, hessians, {2: 1.0})
    assert narrowest.after[2] < all_widths.after[2]
    assert narrowest.after[5] > 2 * all_widths.after[5]


def test_rows_and_blocks_do_not_depend_on_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hessians = correlated(3, 24, 40)
    book = start(weights, hessians)
    together = refit(book, weights, hessians).book
    again = refit(book, weights, hessians).book
    monkeypatch.setattr(module, "_at_once", lambda _: 5 * 3 * 40)  # five rows at a time
    apart = refit(book, weights, hessians).book
    assert torch.equal(again.codes, together.codes)
    for bits in WIDTHS:
        one, other = (errors(b, weights, hessians, bits) for b in (together, apart))
        torch.testing.assert_close(one, other, rtol=1e-2, atol=0)  # sums in another order


@pytest.mark.parametrize("part", [32, 64])
def test_a_descent_in_parts_is_the_descent(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hessians = correlated(2, 30, 150)
    book = start(weights, hessians)
    monkeypatch.setattr(module, "_PART", 1 << 20)
    whole = refit(book, weights, hessians)
    monkeypatch.setattr(module, "_PART", part)
    parts = refit(book, weights, hessians)
    same = (parts.book.codes == whole.book.codes).float().mean()
    assert same > 0.9  # sums in another order: near ties fall otherwise, and what follows them
    for bits in WIDTHS:
        torch.testing.assert_close(parts.after[bits], whole.after[bits], rtol=1e-2, atol=0)


def test_tables_are_least_squares_of_their_codes() -> None:
    weights, hessians = correlated(1, 3, 16)
    fitted = refit(start(weights, hessians), weights, hessians).book
    metric = torch.linalg.cholesky(damped(hessians)[0]).T.double()  # |metric v|^2 = v H v
    for row in range(3):
        index = fitted.codes[row].long() >> 3
        places = torch.nn.functional.one_hot(index, 4).double()
        used = places.any(0)
        wanted = (metric @ weights[0, row].double())[:, None]
        best = torch.linalg.lstsq(metric @ places[:, used], wanted).solution[:, 0]
        torch.testing.assert_close(fitted.centroids[2][row, used], best, rtol=0.02, atol=2e-3)


def test_no_single_code_is_better_after_a_sweep() -> None:
    weights, hessians = correlated(1, 4, 8)
    metric = damped(hessians)
    book = fit_codebook(weights[0], metric[0].diagonal()[None], 2, 2, BF16)
    tables = book.centroids[2].float().view(1, 4, 4)
    codes = book.codes.view(1, 4, 8)
    fit = module._Fit(codes, tables, weights, metric, [2])
    for _ in range(20):
        fit.sweep()
    least = fit.errors()
    for row in range(4):
        for column in range(8):
            for code in range(4):
                kept = int(fit.codes[0, row, column])
                fit.codes[0, row, column] = code
                assert fit.errors()[0, row, 0] >= least[0, row, 0] * (1 - 1e-5)
                fit.codes[0, row, column] = kept


@pytest.mark.parametrize(
    "special", ["zero weights", "equal weights", "zero hessian", "dead column"]
)
def test_degenerate_blocks_stay_finite_and_exact_where_they_were(special: str) -> None:
    weights, hessians = correlated(2, 8, 16)
    if special == "zero weights":
        weights[0] = 0
    elif special == "equal weights":
        weights[0] = 0.25
    elif special == "zero hessian":
        hessians[0] = 0
    else:
        hessians[0, 3] = hessians[0, :, 3] = 0
    fitted = refit(start(weights, hessians), weights, hessians).book
    for bits in WIDTHS:
        levels = fitted.dequantize(bits).float().view(weights.shape)
        assert torch.isfinite(levels).all()
        if special in ("zero weights", "equal weights"):
            torch.testing.assert_close(levels[0], weights[0], rtol=1e-3, atol=1e-6)


def test_a_zero_hessian_counts_as_plain_squared_error() -> None:
    assert torch.equal(damped(torch.zeros(2, 3, 3)), 1.01 * torch.eye(3).expand(2, 3, 3))


def test_the_width_in_focus_gains_most_and_its_neighbour_is_kept() -> None:
    weights, hessians = correlated(1, 40, 128)
    weights, hessians = weights.expand(2, -1, -1), hessians.expand(2, -1, -1)
    book = start(weights, hessians)
    alike = refit(book, weights, hessians)
    fitted = refit(book, weights, hessians, focus=torch.tensor([2, 4]))
    gain = {b: fitted.after[b] / alike.after[b] for b in WIDTHS}
    assert gain[2][0] < 0.7 < gain[2][1]
    assert gain[4][1] < 1.0 < gain[4][0]
    assert gain[3][0] < 1.3
    alone = refit(
        start(weights[:1], hessians[:1]), weights[:1], hessians[:1], focus=torch.tensor([2])
    )
    torch.testing.assert_close(alone.after[2][0], fitted.after[2][0], rtol=1e-2, atol=0)


def test_importance_falls_with_the_distance_from_the_focus() -> None:
    found = module.focused([2, 3, 4, 5], torch.tensor([2, 4]))
    assert found.tolist() == [
        pytest.approx([1.0, 0.1, 0.01, 0.01]),
        pytest.approx([0.01, 0.1, 1.0, 0.1]),
    ]


def test_codes_that_make_up_for_columns_before_them_are_better_than_the_nearest() -> None:
    weights, hessians = correlated(2, 40, 128)
    book, hessians = start(weights, hessians), damped(hessians)
    levels = torch.cat([book.centroids[b] for b in WIDTHS], 1).float().view(2, 40, -1)
    codes = book.codes.view(weights.shape)
    fits = [module._Fit(codes, levels, weights, hessians, list(WIDTHS)) for _ in range(2)]
    for fed, fit in zip(([False, False], [True, False]), fits, strict=True):
        fit.run(module.focused(WIDTHS, torch.tensor([4, 4])), 1, torch.tensor(fed))
    nearest, fed_back = (fit.errors()[..., 2].sum(1) for fit in fits)
    assert fed_back[0] < 0.95 * nearest[0]
    assert fed_back[1] == nearest[1]


def test_errors_of_rows_cancel_where_the_loss_sees_their_sum() -> None:
    weights, hessians = correlated(2, 40, 64)[0], torch.eye(64).expand(2, -1, -1)
    book, focus = start(weights, hessians), torch.tensor([3, 4])
    common = torch.full((40, 40), 0.5) + torch.eye(40)  # the sum counts 21 times a difference

    def damage(outputs: Tensor | None) -> Tensor:
        fitted = refit(book, weights, hessians, focus=focus, outputs=outputs).book
        found = []
        for block, bits in enumerate(focus.tolist()):
            gap = weights[block] - fitted.dequantize(bits).float().view(weights.shape)[block]
            found.append(((common @ gap @ damped(hessians)[block]) * gap).sum())
        return torch.stack(found)

    apart, together = damage(None), damage(common)
    assert (together < 0.85 * apart).all()
    torch.testing.assert_close(damage(torch.eye(40)), apart, rtol=0.01, atol=0)


def test_rows_that_change_together_are_few_where_they_hang_together() -> None:
    assert module.rows_apart(torch.eye(64)) == 4
    assert module.rows_apart(torch.eye(3)) == 1
    assert module.rows_apart(torch.full((64, 64), 0.05) + torch.eye(64)) == 8
    assert module.rows_apart(torch.ones(64, 64) + 0.05 * torch.eye(64)) == 64


def tf32(values: Tensor) -> Tensor:
    """Rounded to 10 bits of mantissa, as a GPU's tensor cores round what they multiply."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def test_errors_fall_as_far_with_the_rounding_of_tensor_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, hessians = correlated(2, 60, 96)
    book = start(weights, hessians)
    exact = refit(book, weights, hessians).book

    def rounded(self: module._Fit, values: Tensor) -> Tensor:
        blocks, _, cols = self.weights.shape
        product = torch.bmm(tf32(values.view(blocks, -1, cols)), tf32(self.hessians))
        return product.view(values.shape)

    assert 0 < (tf32(hessians) - hessians).abs().max() <= 2**-11 * hessians.abs().max()
    monkeypatch.setattr(module._Fit, "times_hessian", rounded)
    coarse = refit(book, weights, hessians).book
    for bits in WIDTHS:
        before, good, bad = (errors(b, weights, hessians, bits) for b in (book, exact, coarse))
        assert ((bad - good).abs() < 0.05 * before).all(), bits
        assert (bad < 0.6 * before).all(), bits
    assert torch.backends.cuda.matmul.allow_tf32 is False
