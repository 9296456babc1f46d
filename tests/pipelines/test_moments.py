import pytest
import torch
from torch import Tensor, nn

from pw.blocks import BlockShape, ExpertGeometry
from pw.errors import ConfigError, ModelError
from pw.models.dense import TorchExperts
from pw_pipelines.moments import THIN_TOKENS, Coverage, MomentSums, finish_moments

GEOMETRY = ExpertGeometry((0, 3), 3, 2, BlockShape(10, 6), BlockShape(6, 5))


class Layer(nn.Module):
    num_experts = 3


def experts(observer: MomentSums) -> TorchExperts:
    """The dense experts function over random weights, under observation."""
    tables = {"gate_up": torch.randn(2, 3, 10, 6), "down": torch.randn(2, 3, 6, 5)}
    function = TorchExperts(
        lambda slot, expert, module, _: tables[module][slot, expert],
        lambda *_: None,
        ["silu", "silu"],
    )
    function.observer = observer
    return function


def route(busy: dict[int, int]) -> Tensor:
    """Expert ids [T, 1]: as many tokens for each expert as asked."""
    return torch.cat([torch.full((n, 1), e, dtype=torch.int64) for e, n in busy.items()])


@torch.no_grad()
def measured(busy: dict[int, int], x: Tensor | None = None) -> MomentSums:
    """Sums after both layers saw tokens routed as asked."""
    sums = MomentSums(GEOMETRY)
    function, ids = experts(sums), route(busy)
    x = torch.randn(len(ids), 6) if x is None else x
    for slot in (0, 1):
        function(slot, Layer(), x, ids, torch.full(ids.shape, 0.5))
    return sums


def test_means_of_squared_inputs_counts_and_mass() -> None:
    x = torch.randn(300, 6)
    moments = finish_moments(measured({0: 100, 1: 70, 2: 130}, x))
    torch.testing.assert_close(torch.from_numpy(moments.gate_up[1, 1]), x[100:170].square().mean(0))
    assert moments.down.shape == (2, 3, 5)
    assert moments.tokens.tolist() == [[100, 70, 130]] * 2
    assert moments.mass[0].tolist() == pytest.approx([100 / 300, 70 / 300, 130 / 300])
    assert moments.counts() == {"dead": 0, "thin": 0, "ok": 3 * 2}


def test_a_one_token_expert_leans_on_its_layer_and_a_dead_one_on_the_median() -> None:
    x = torch.randn(201, 6) * torch.tensor([1.0, 2, 3, 4, 5, 6])
    sums = measured({0: 200, 1: 1}, x)
    moments = finish_moments(sums)
    assert moments.coverage.tolist() == [[Coverage.OK, Coverage.THIN, Coverage.DEAD]] * 2
    layer_mean = x.double().square().mean(0)
    expected = (x[200].double().square() + THIN_TOKENS * layer_mean) / (1 + THIN_TOKENS)
    torch.testing.assert_close(torch.from_numpy(moments.gate_up[0, 1]), expected.float())
    scales = [x[:200].square().mean(), x[200].square().mean()]
    assert moments.gate_up[0, 2].tolist() == pytest.approx([min(scales).item()] * 6)
    inner = sums.squares["down"][0].sum() / 201 / 5  # inner units of experts are not aligned
    expected = (sums.squares["down"][0, 1] + THIN_TOKENS * inner) / (1 + THIN_TOKENS)
    torch.testing.assert_close(torch.from_numpy(moments.down[0, 1]), expected.float())


def test_a_layer_without_a_well_seen_expert_is_refused() -> None:
    with pytest.raises(ConfigError, match="in layer 0 no expert saw 64 tokens, the busiest saw 63"):
        finish_moments(measured({0: 63, 1: 20}))


def test_rows_that_are_not_finite_are_dropped_up_to_a_limit() -> None:
    x = torch.randn(200, 6)
    x[7, 2], x[9, 0] = torch.nan, torch.inf
    moments = finish_moments(measured({0: 200}, x))
    kept = [i for i in range(200) if i not in (7, 9)]
    torch.testing.assert_close(torch.from_numpy(moments.gate_up[0, 0]), x[kept].square().mean(0))
    assert torch.isfinite(torch.from_numpy(moments.down)).all()
    x[:30, 1] = torch.nan
    message = "experts of layer 0 are not finite in 30 of 200 rows, limit 10%"
    with pytest.raises(ModelError, match=message):
        finish_moments(measured({0: 200}, x))
