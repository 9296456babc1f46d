"""Tables that rows share: what is fitted, what an artifact says, what an engine serves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pw.blocks import BlockShape, ExpertGeometry
from pw.config import TuneConfig
from pw.engine.request import SamplingParams
from pw.evaluation.lab import Lab, LabModel
from pw.evaluation.perplexity import perplexity
from pw.evaluation.report.trace import read_timeline
from pw.planning.bits_file import write_bits
from pw.store.artifact import Artifact
from pw.store.verify import verify
from pw_kernels.bitplane import lut_bytes
from pw_pipelines import sharing, tune
from pw_pipelines.refit import damped, refit
from pw_pipelines.sharing import choose_table_bytes, fit_shared, period
from support.engines import make_artifact, open_engine, random_prompt, tight_budget
from support.offline import QUIET

WIDTHS = range(2, 6)
SHAPES = {"num_attention_heads": 2, "hidden_size": 64, "moe_intermediate_size": 64}
TABLE = 256  # bytes: 32, 16, 8 and 4 rows of 2, 3, 4 and 5 bits


def blocks(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [2, 64, 48] of rows of unequal scale, and Hessians of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    scale = 1 + 0.2 * torch.rand(2, 64, 1, generator=generator)
    weights = scale * torch.randn(2, 64, 48, generator=generator)
    inputs = torch.randn(2, 400, 48, generator=generator)
    inputs += 2 * torch.randn(2, 400, 1, generator=generator)
    return weights, inputs.mT @ inputs


def fitted(weights: torch.Tensor, hessians: torch.Tensor, focus: torch.Tensor | None = None):
    moments = hessians.diagonal(dim1=1, dim2=2)
    start = fit_shared(weights, moments, WIDTHS, torch.bfloat16, TABLE)
    return refit(start, weights, hessians, focus=focus, table_bytes=TABLE)


def test_tables_say_the_same_again_and_codes_are_their_own() -> None:
    book = fitted(*blocks()).book
    for bits in WIDTHS:
        apart = period(64, bits, TABLE)
        assert apart == 2 ** (7 - bits)
        tables = book.luts[bits].view(2, 64 // apart, apart, 1 << bits)
        assert (tables == tables[:, :1]).all()
        if apart > 1:
            assert not torch.equal(tables[:, :, 0], tables[:, :, 1])
    assert len(book.codes.unique(dim=0)) == len(book.codes)


def test_shared_tables_are_least_squares_of_all_their_rows() -> None:
    weights, hessians = blocks()
    book = fitted(weights, hessians).book
    metric = torch.linalg.cholesky(damped(hessians)).mT.double()  # |metric v|^2 = v H v
    for bits in (3, 5):
        apart = period(64, bits, TABLE)
        rows = torch.arange(5 % apart, 64, apart)
        codes = book.codes.view(2, 64, 48)[1, rows].long() >> (WIDTHS[-1] - bits)
        places = torch.nn.functional.one_hot(codes, 1 << bits).double()  # [rows, K, C]
        used = places.flatten(0, 1).any(0)
        left = (metric[1] @ places[..., used]).flatten(0, 1)
        right = (metric[1] @ weights[1, rows].double()[..., None]).flatten(0, 1)
        best = torch.linalg.lstsq(left, right).solution[:, 0]
        found = book.centroids[bits].view(2, 64, -1)[1, int(rows[0]), used]

        def error(levels: torch.Tensor, left: torch.Tensor = left, right: torch.Tensor = right):
            return float((left @ levels[:, None] - right).square().sum())

        assert error(best) <= error(found) <= 1.02 * error(best)


def test_the_refit_gains_at_every_width_and_most_in_focus() -> None:
    weights, hessians = blocks()
    alike = fitted(weights, hessians)
    for bits in WIDTHS:
        assert (alike.after[bits] < 0.9 * alike.before[bits]).all()
    focused = fitted(weights, hessians, torch.tensor([3, 5]))
    assert focused.after[3][0] < alike.after[3][0]
    assert focused.after[5][1] < alike.after[5][1]


def test_blocks_fitted_together_are_those_fitted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, hessians = blocks()
    whole = fitted(weights, hessians, torch.tensor([3, 5])).book
    monkeypatch.setattr("pw_pipelines.refit._at_once", lambda device: 64 * 48)
    parts = fitted(weights, hessians, torch.tensor([3, 5])).book
    assert (whole.codes == parts.codes).float().mean() > 0.9  # sums in another order
    for bits in WIDTHS:
        torch.testing.assert_close(
            whole.dequantize(bits).float(), parts.dequantize(bits).float(), rtol=0, atol=0.5
        )


@pytest.mark.parametrize(
    ("gate_up", "down", "expected"),
    [
        ((512, 512), (512, 256), 4096),  # moe-small
        ((2816, 2048), (2048, 1408), None),  # Qwen1.5-MoE: tables are cheap
        ((512, 512), (480, 256), None),  # rows do not come out even
    ],
)
def test_rows_share_where_tables_are_dear_and_rows_come_out_even(
    gate_up: tuple[int, int], down: tuple[int, int], expected: int | None
) -> None:
    geometry = ExpertGeometry((0,), 4, 2, BlockShape(*gate_up), BlockShape(*down))
    assert choose_table_bytes(geometry, 8) == expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random checkpoint and its artifact, tuned with tables that rows really share."""
    folder = tmp_path_factory.mktemp("shared")
    make_artifact("qwen2_moe", folder, **SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "TABLE_BYTES", 512)
        tune.run(folder / "model.pw", folder / "tuned.pw", TuneConfig(3.5), QUIET)
    return folder


def test_a_tuned_artifact_says_that_rows_share(made: Path) -> None:
    artifact = Artifact.open(made / "tuned.pw")
    assert artifact.table_bytes == 512
    assert Artifact.open(made / "model.pw").table_bytes is None
    assert verify(made / "tuned.pw") == []
    key = next(iter(artifact.geometry.keys()))
    rows = artifact.geometry.shape(key.module).rows
    assert lut_bytes(rows, 6) > 512
    for bits in artifact.manifest.widths:
        table = artifact.lut(key, bits)
        apart = period(len(table), bits, 512)
        assert torch.equal(table, table[:apart].repeat(len(table) // apart, 1))


@pytest.mark.parametrize("page", [4096, None])
def test_an_engine_serves_the_same_losses_from_fewer_bytes(
    made: Path, page: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LabModel.open(made / "tuned.pw", made / "checkpoint")
    lab = Lab(model, [torch.tensor(random_prompt(40, seed)) for seed in range(3)])
    mixed = np.random.default_rng(3).integers(2, 7, model.geometry.blocks)
    write_bits(tmp_path / "bits.json", model.geometry, mixed)
    texts = [window.ids.tolist() for window in lab.windows]
    policy = f"static:{tmp_path / 'bits.json'}"
    engine = open_engine(made / "tuned.pw", policy, page_bytes=page)
    np.testing.assert_allclose(lab.score(mixed).nll, perplexity(engine, texts).chunk_nll, atol=1e-4)
    held = engine.status().bytes
    monkeypatch.setattr(Artifact, "table_bytes", None)
    whole = open_engine(made / "tuned.pw", policy, page_bytes=page).status().bytes
    assert held.planes == whole.planes
    assert held.luts <= whole.luts


def test_widths_fall_and_rise_again_while_requests_come(made: Path, tmp_path: Path) -> None:
    """Narrower tables come from the host at each reduction: none is held beside the one in use."""
    artifact, trace = made / "tuned.pw", tmp_path / "trace.jsonl"
    budget = tight_budget(artifact, kv_tokens=96, page_bytes=4096)
    engine = open_engine(artifact, memory_budget=budget, page_bytes=4096, trace=trace)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    for number in range(4):
        engine.add_request(f"r{number}", random_prompt(24, seed=number), params)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    given_up, end = engine.status().mean_bits, time.monotonic() + 60
    while engine.status().mean_bits <= given_up and time.monotonic() < end:
        engine.idle_turn()
        engine.check_integrity()
    assert engine.status().mean_bits > given_up  # came back
    engine.add_request("again", random_prompt(24, seed=0), params)
    while engine.has_work():
        engine.step()
        engine.check_integrity()
    engine.close()
    found = read_timeline(trace, Artifact.open(artifact))
    assert min(found.bits) < 5  # something was given up
    assert len({sum(held) for held in zip(found.weights, found.kv, found.free, strict=True)}) == 1
    assert not any(json.loads(row)["event"] == "failed" for row in trace.read_text().splitlines())
