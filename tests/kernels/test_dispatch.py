"""Which backend takes which call, and that a wrong wish is refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pw_kernels import dispatch, reference, testing


class Call:
    """One MoE call whose backend is recorded instead of run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, without: tuple[str, ...] = ()) -> None:
        self.used = ""
        arena = testing.ScatteredArena(60, 4096)
        self.blocks = [
            testing.random_blocks(arena, *shape, [4, 4]) for shape in ((64, 128), (128, 32))
        ]
        ids = torch.tensor([[0, 1]])
        self.args = (torch.randn(1, 128), ids, torch.ones(1, 2), arena.data)
        original = dispatch._module

        def fake(name: str) -> Any:
            return None if name in without else original(name)

        monkeypatch.setattr(dispatch, "_module", fake)
        for module, label in ((reference, "reference"), (original("cpu_moe"), "numba")):
            monkeypatch.setattr(module, "fused_moe", self._record(label))

    def _record(self, label: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.used = label
            return torch.empty(0)

        return run

    def __call__(self, **kwargs: Any) -> str:
        kwargs = {"lut_dtype": torch.bfloat16, "activation": "silu", **kwargs}
        dispatch.fused_moe(*self.args, *self.blocks, **kwargs)
        return self.used


def test_cpu_tensors_go_to_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch)
    assert call() == "numba"
    assert call(backend="reference") == "reference"


def test_without_numba_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(monkeypatch, without=("cpu_moe",))
    assert call() == "reference"
    assert dispatch.available_backends()[0] == "reference"
    assert "numba" not in dispatch.available_backends()
    with pytest.raises(ValueError, match="'numba' cannot run"):
        call(backend="numba")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"activation": lambda hidden: hidden[..., :32]},
        {"lut_dtype": torch.float32},
    ],
)
def test_what_only_the_reference_can_do(
    monkeypatch: pytest.MonkeyPatch, kwargs: dict[str, Any]
) -> None:
    call = Call(monkeypatch)
    assert call(**kwargs) == "reference"
    with pytest.raises(ValueError, match="'numba' cannot run"):
        call(backend="numba", **kwargs)


def test_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="auto, reference, numba, triton, cuda, got 'cublas'"):
        Call(monkeypatch)(backend="cublas")


def test_results_agree_through_the_door() -> None:
    """The same call by every backend that runs here, Triton by its interpreter."""
    arena = testing.ScatteredArena(60, 4096)
    blocks = [testing.random_blocks(arena, *shape, [4, 3]) for shape in ((64, 128), (128, 32))]
    args = (torch.randn(2, 128), torch.tensor([[0, 1], [1, 0]]), torch.rand(2, 2), arena.data)
    want, *others = (
        dispatch.fused_moe(
            *args, *blocks, lut_dtype=torch.bfloat16, activation="silu", backend=backend
        )
        for backend in ("reference", "numba", "triton")
    )
    for got in others:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "dtype"), [(8, torch.float32), (16, torch.float16)])
def test_attention_falls_back(size: int, dtype: torch.dtype) -> None:
    pages = torch.randn(2, 4, 1, size).to(dtype)
    starts = torch.tensor([0, 1]).int()
    args = (torch.randn(1, 2, size), pages, pages, torch.tensor([[1]]).int(), starts, starts[1:])
    want = reference.paged_attention(*args, scale=1.0)
    assert torch.equal(dispatch.paged_attention(*args, scale=1.0), want)
    with pytest.raises(ValueError, match="'numba' cannot run"):
        dispatch.paged_attention(*args, scale=1.0, backend="numba")


def test_routing_statistics_add_up_for_every_backend() -> None:
    arena = testing.ScatteredArena(60, 4096)
    blocks = [testing.random_blocks(arena, *shape, [4, 3]) for shape in ((64, 128), (128, 32))]
    ids, weights = torch.tensor([[0, 1], [2, 1], [-1, 0]]), torch.rand(3, 2)
    want = torch.tensor([weights[0, 0] + weights[2, 1], weights[0, 1] + weights[1, 1]])
    for backend in ("reference", "numba", "triton"):
        statistics = torch.ones(2, 2)
        dispatch.fused_moe(
            torch.randn(3, 128), ids, weights, arena.data, *blocks, lut_dtype=torch.bfloat16,
            activation="silu", backend=backend, statistics=statistics,
        )  # fmt: skip
        torch.testing.assert_close(statistics[0] - 1, want)
        assert (statistics[1] - 1 < want).all()  # squares of weights below one


@pytest.mark.parametrize("backend", ["reference", "numba", "triton"])
@pytest.mark.parametrize("live", [0, 1, 3])
def test_padding_has_no_expert_and_counts_for_nothing(backend: str, live: int) -> None:
    arena = testing.ScatteredArena(60, 4096)
    blocks = [testing.random_blocks(arena, *shape, [4, 3]) for shape in ((64, 128), (128, 32))]
    x, ids, weights = torch.randn(3, 128), torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.rand(3, 2)
    how: Any = {"lut_dtype": torch.bfloat16, "activation": "silu", "backend": backend}

    def call(x: Any, *routing: Any, **extra: Any) -> Any:
        statistics = torch.zeros(2, 2)
        out = dispatch.fused_moe(
            x, *routing, arena.data, *blocks, **how, statistics=statistics, **extra
        )
        return out, statistics

    padded, counted = call(x, ids, weights, live=torch.tensor([live], dtype=torch.int32))
    alone, expected = call(x[:live], ids[:live], weights[:live])
    assert torch.equal(padded[:live], alone)
    assert not padded[live:].any()
    assert torch.equal(counted, expected)


def test_import_costs_torch_alone() -> None:
    code = (
        "import sys; from pw_kernels import dispatch;"
        "assert not {'numba', 'triton'} & set(sys.modules), 'loaded at import'"
    )
    kernels = Path(dispatch.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=kernels, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
