from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pw.store.tensor_file import TensorSource, write_tensors


def sample() -> dict[str, torch.Tensor]:
    dtypes = (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )  # fmt: skip
    tensors = {f"b.{str(d)[6:]}": (4 * torch.rand(3, 5)).to(d) for d in dtypes}
    return tensors | {
        "a.scalar": torch.tensor(2.5),
        "a.empty": torch.zeros(0, 7, dtype=torch.bfloat16),
        'z.name with "quotes" é': torch.arange(11, dtype=torch.int32),
    }


def test_bytes_are_those_of_the_formats_own_writer(tmp_path: Path) -> None:
    tensors = sample()
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    write_tensors(tmp_path / "ours", {name: TensorSource.of(t) for name, t in tensors.items()})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tensors_are_read_one_at_a_time_and_let_go(tmp_path: Path) -> None:
    held: list[int] = []

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            held.append(-1)

    most = 0

    def read() -> torch.Tensor:
        nonlocal most
        held.append(1)
        most = max(most, sum(held))
        return torch.ones(6).as_subclass(Counted)

    sources = {f"t{i}": TensorSource(torch.float32, (6,), read) for i in range(9)}
    write_tensors(tmp_path / "file", sources)
    assert most <= 2  # the next is read before the last one is let go
    assert sum(held) <= 1


def test_another_tensor_than_promised_is_refused(tmp_path: Path) -> None:
    source = TensorSource(torch.float32, (3,), lambda: torch.ones(2))
    with pytest.raises(ValueError, match=r"`w` is torch.float32 \[2\], not as promised"):
        write_tensors(tmp_path / "file", {"w": source})
