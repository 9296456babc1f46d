from pathlib import Path

import numpy as np
import pytest
import torch

from pw.blocks import MODULES
from pw.models.features import prompt_features
from pw.models.tokenizer import load_tokenizer
from pw.planning.residual import ExactResidual
from pw.store.artifact import Artifact
from pw_pipelines import trace
from pw_pipelines.calibration import calibration_set
from pw_pipelines.moments import MomentSums, finish_moments
from pw_pipelines.observation import ObservedModel
from pw_pipelines.trace import BlockScores, PromptTraces
from support.offline import QUIET, TINY_TEXT


@pytest.fixture(scope="module")
def traced(measured: tuple[Path, object]) -> Artifact:
    return Artifact.open(measured[0])


def test_routing_and_features_are_those_of_the_prompt(
    traced: Artifact, model: ObservedModel
) -> None:
    table = traced.table("routing").arrays
    window = calibration_set(TINY_TEXT, load_tokenizer(traced.path)).windows[1:2]
    assert table["tokens"].tolist() == [TINY_TEXT.seqlen] * 8
    assert (table["counts"].sum(2) == 2 * TINY_TEXT.seqlen).all()

    class Keep(MomentSums):
        def routed(self, slot, inputs, ids, weights):
            super().routed(slot, inputs, ids, weights)
            if slot == 3:
                self.features = prompt_features(inputs)

    kept = Keep(model.geometry)
    model.read(window, [kept])
    np.testing.assert_array_equal(table["counts"][1], kept.tokens)
    np.testing.assert_allclose(table["mass"][1], kept.mass, rtol=1e-4)
    np.testing.assert_allclose(table["features"][1, 3], kept.features, rtol=1e-3, atol=1e-4)


def test_pairs_are_the_tokens_that_two_experts_share(traced: Artifact) -> None:
    table = traced.table("routing").arrays
    pairs, counts = table["pairs"], table["counts"].sum(0)
    assert pairs.dtype == np.int64
    np.testing.assert_array_equal(np.diagonal(pairs, axis1=1, axis2=2), counts)
    np.testing.assert_array_equal(pairs, pairs.transpose(0, 2, 1))
    np.testing.assert_array_equal(pairs.sum(2), 2 * counts)  # a token has two experts


def test_pairs_of_a_few_tokens_by_hand(traced: Artifact, model: ObservedModel) -> None:
    scores = BlockScores.from_tables(traced.table("sensitivity"), traced.table("moments"))
    prompts = PromptTraces(model.geometry, scores, 2, 2)
    ids = torch.tensor([[0, 3], [3, 0], [1, 3], [0, 1]])
    prompts.routed(1, torch.zeros(4, 256), ids, torch.full((4, 2), 0.5))
    want = torch.zeros(8, 8, dtype=torch.int64)
    for first, second in ids.tolist():
        want[first, first] += 1
        want[second, second] += 1
        want[first, second] += 1
        want[second, first] += 1
    assert torch.equal(prompts.pairs[1], want)
    assert not prompts.pairs[0].any()


def test_targets_agree_with_the_planners_exact_residual(
    traced: Artifact, model: ObservedModel
) -> None:
    """At one width, y is the log of the ratio that the planner computes from moments."""
    tables = {name: traced.table(name).arrays for name in ("routing", "sensitivity", "moments")}
    window = calibration_set(TINY_TEXT, load_tokenizer(traced.path)).windows[2:3]
    sums = MomentSums(model.geometry)
    model.read(window, [sums])
    means = finish_moments(sums)
    energies = tuple(tables["sensitivity"][f"energy_{m}"][:, :, :1] for m in MODULES)
    exact = ExactResidual(energies, tuple(tables["moments"][m] for m in MODULES), 9.0, prior=0.0)
    eta = exact.eta((means.gate_up, means.down), means.tokens)
    scores = BlockScores.from_tables(traced.table("sensitivity"), traced.table("moments"))
    narrow = BlockScores(
        {m: scores.energies[m][:, :, :1] for m in MODULES},
        {m: scores.scores[m][:, :, :1] for m in MODULES},
    )
    prompt = PromptTraces(model.geometry, narrow, 1, TINY_TEXT.seqlen)
    model.read(window, [prompt])
    well_seen = means.tokens >= 64
    np.testing.assert_allclose(prompt.y[0].numpy()[well_seen], np.log(eta[well_seen]), atol=1e-3)
    both = tables["routing"]["y"][2][well_seen]  # the mean over both widths is near
    np.testing.assert_allclose(both, np.log(eta[well_seen]), atol=0.1)


def test_experts_that_a_prompt_does_not_reach_have_no_target(
    traced: Artifact, model: ObservedModel
) -> None:
    scores = BlockScores.from_tables(traced.table("sensitivity"), traced.table("moments"))
    prompt = PromptTraces(model.geometry, scores, 1, 1)
    model.read(torch.tensor([[42]]), [prompt])
    assert (prompt.counts.sum(2) == 2).all()
    reached = prompt.counts[0].numpy() > 0
    assert np.isfinite(prompt.y[0].numpy()[reached]).all()
    assert np.isnan(prompt.y[0].numpy()[~reached]).all()


def test_the_calibration_text_as_a_whole_has_no_residual(traced: Artifact) -> None:
    """s is linear in moments: token-weighted, the prompts' ratios average to 1."""
    scores = BlockScores.from_tables(traced.table("sensitivity"), traced.table("moments"))
    arrays = traced.table("moments").arrays
    for index, module in enumerate(MODULES):
        moments = torch.from_numpy(arrays[module][1, 5])[None]
        assert scores.residual(1, 5, module, moments).item() == pytest.approx(0, abs=1e-6)
        table = traced.table("routing").arrays
        counts = table["counts"][:, 1, 5]
        ratios = np.exp(table["y"][:, 1, 5, index].astype(np.float64))
        assert np.average(ratios, weights=counts) == pytest.approx(1, abs=0.02)


def test_the_same_again_does_nothing(traced: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "ObservedModel", None)
    report = trace.run(traced.path, TINY_TEXT, QUIET)
    assert (report.prompts, report.tokens) == (8, 8 * TINY_TEXT.seqlen)
    assert all(1 / 8 < share < 1 for share in report.largest_share)
    assert all(1 < count < 8 for count in report.effective_experts)
    assert 0.05 < report.spread < 1
