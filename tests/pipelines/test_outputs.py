"""Second moments of gradients at the outputs of experts."""

import torch

from pw.models.dense import ExpertCall
from pw_pipelines.observation import ObservedModel
from pw_pipelines.outputs import WINDOWS, OutputSums, measure_outputs
from support.offline import QUIET

CPU = torch.device("cpu")


def test_sums_are_of_the_gradients_of_finite_tokens(model: ObservedModel) -> None:
    sums = OutputSums(model.geometry, CPU)
    rows = sums.sums.shape[1]
    expected = torch.zeros(2, rows, rows)
    for slot, expert in ((0, 1), (0, 3), (1, 1)):
        gradient = torch.randn(4, rows)
        output = torch.zeros(4, rows, requires_grad=True)
        nothing = torch.empty(0)
        sums.expert(ExpertCall(slot, expert, nothing, nothing, nothing, nothing, nothing, output))
        expected[slot] += gradient[:3].T @ gradient[:3]
        gradient[3, 5] = torch.nan
        output.backward(gradient)
    torch.testing.assert_close(sums.sums[:2], expected)
    assert not sums.sums[2:].any()


def test_they_are_measured_on_the_first_windows(model: ObservedModel) -> None:
    windows = torch.randint(300, 4000, (WINDOWS + 8, 24))
    found = measure_outputs(model, windows, QUIET)
    layers, rows = len(model.geometry.layers), model.geometry.shape("down").rows
    assert found.shape == (layers, rows, rows)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found.diagonal(dim1=1, dim2=2).mean(1), torch.full((layers,), 1.05))
    assert (torch.linalg.eigvalsh(found) > 0.04).all()
    assert (torch.linalg.eigvalsh(found)[:, -1] > 2).all()  # far from the identity
    torch.testing.assert_close(measure_outputs(model, windows[:WINDOWS], QUIET), found)
