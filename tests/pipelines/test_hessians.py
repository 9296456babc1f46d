import torch
from torch import Tensor

from pw.models.dense import ExpertCall, ExpertObserver
from pw_pipelines.hessians import blend, moment
from pw_pipelines.moments import measure_moments
from pw_pipelines.observation import ObservedModel, batches


class Recorder(ExpertObserver):
    """Keeps what the experts of one layer were given."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.calls: list[ExpertCall] = []

    def expert(self, call: ExpertCall) -> None:
        if call.slot == self.slot:
            self.calls.append(call)


def windows() -> Tensor:
    return torch.randint(5, 500, (6, 512))


def test_each_wanted_layer_is_given_once_with_the_moments_of_its_inputs(
    model: ObservedModel,
) -> None:
    text = windows()
    given: dict[int, dict[str, Tensor]] = {}

    def give(layer: int, _: object, hessians: dict[str, Tensor]) -> None:
        if not hessians:
            return
        assert layer not in given
        given[layer] = hessians

    measure_moments(model, text, give, hessians={1, 3})
    assert list(given) == [1, 3]
    recorder = Recorder(slot=3)
    model.read(text, [recorder] * len(list(batches(text))))
    busiest = max(recorder.calls, key=lambda call: len(call.tokens)).expert
    calls = [call for call in recorder.calls if call.expert == busiest]
    inputs = torch.cat([c.inputs * c.weights[:, None] for c in calls])
    hidden = torch.cat([c.hidden * c.weights[:, None] for c in calls])
    count = len(inputs)
    assert count > 256
    for module, rows in (("gate_up", inputs), ("down", hidden)):
        own = rows.T @ rows
        own /= own.diagonal().mean()
        # An expert's own tokens outweigh the prior of 256; both have a mean diagonal of 1.
        found = given[3][module][busiest]
        torch.testing.assert_close(found.diagonal().mean(), torch.tensor(1.0), rtol=1e-4, atol=0)
        prior = (found * (count + 256) - count * own) / 256
        torch.testing.assert_close(prior, prior.T, rtol=1e-3, atol=1e-3)
        if module == "down":
            torch.testing.assert_close(prior, torch.diag(own.diagonal()), rtol=1e-2, atol=1e-2)


def test_tokens_that_are_not_finite_do_not_count() -> None:
    inputs, weights = torch.randn(7, 3), torch.rand(7)
    damaged = inputs.clone()
    damaged[2, 1], damaged[5, 0] = torch.nan, torch.inf
    kept = [0, 1, 3, 4, 6]
    torch.testing.assert_close(moment(damaged, weights), moment(inputs[kept], weights[kept]))


def test_few_tokens_lean_on_the_layer_and_none_on_nothing_else() -> None:
    rows = torch.randn(3, 40, 4)
    sums = rows.transpose(1, 2) @ rows
    sums[2] = 0
    tokens = torch.tensor([1 << 20, 8, 0])
    layer = sums.sum(0) / sums.sum(0).diagonal().mean()
    gate_up, down = sums.clone(), sums.clone()
    blend(gate_up, tokens, "gate_up")
    own = sums / sums.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    torch.testing.assert_close(gate_up[0], own[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(gate_up[1], (8 * own[1] + 256 * layer) / 264)
    torch.testing.assert_close(gate_up[2], layer)
    blend(down, tokens, "down")
    torch.testing.assert_close(
        down[1], (8 * own[1] + 256 * torch.diag(own[1].diagonal())) / 264
    )  # inner units of other experts say nothing
    torch.testing.assert_close(down[2], torch.eye(4))
