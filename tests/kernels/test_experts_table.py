"""Tables of the experts' benchmark: cells, missing records, which of two files counts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import experts_table  # type: ignore[import-not-found]


def record(width: str, us: float, **more: Any) -> dict[str, Any]:
    sizes = {"bytes": 4_000_000, "weights": 8_000_000}
    return {"model": "mixtral", "tokens": 32, "width": width, "us": us} | sizes | more


RECORDS = [
    record("bf16 triton", 80.0, layer_us=100.0),
    record("bf16 torch", 240.0),
    record("4", 40.0, ratio=2.0, torch_ratio=6.0, layer_us=50.0, layer_ratio=2.0),
    record("planned 3", 32.0, ratio=2.5, layer_us=48.0, layer_ratio=2.083),
]


def test_a_cell_has_its_time_and_ratio() -> None:
    text = experts_table.markdown(RECORDS)
    assert "#### Mixtral-8x7B" in text
    assert "| T | Triton | torch | 4 bit | planned 3 |" in text
    assert "| 32 | 80.0 | 240 | 40.0 (2.00) | 32.0 (2.50) |" in text
    assert "| 32 | 100 | 50.0 (2.00) | 48.0 (2.08) |" in text
    assert "peer" not in text  # none was measured


def test_peers_stand_beside_whole_layers() -> None:
    peer = record("torch int4", 20.0, rows=8, ratio=1.0)
    row = experts_table.markdown([*RECORDS, peer]).splitlines()[-1]
    # 8 M weights in 100, 50 and 20 us; 8 bits were not measured
    assert row == "| 32 | 8 | 0.08 | 0.16 |  | 0.40 |"


def test_lines_have_rates() -> None:
    last = experts_table.lines(RECORDS[2:3]).splitlines()[-1].split()
    assert last == ["mixtral", "32", "4", "40.0", "0.10", "0.20", "2.00", "6.00", "50.0", "2.00"]


def test_marks_name_the_worst_and_what_is_met() -> None:
    slow = record("4", 160.0, ratio=0.5) | {"tokens": 64}
    mixed = RECORDS[3] | {"mean_layer_us": 40.0}
    rows = dict(
        line.strip("| ").rsplit(" | ", 1)
        for line in experts_table.marks([*RECORDS[:3], mixed, slow])
        if " | " in line.strip("| ")
    )
    assert rows["T = 32, 4 bit: 2.5 times Triton"] == "2.00"
    assert rows["up to T = 128, 4 bit: never slower than Triton"] == "0.50"
    key = "planned mix of 3 bits, T = 32: layer within 1 % of uniform widths' mean"
    assert rows[key] == "1.20"
    met = experts_table.marks([record("4", 20.0, ratio=4.0)])
    assert "| T = 32, 4 bit: 2.5 times Triton | **4.00** |" in list(met)


def test_the_last_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    files = [tmp_path / "old.json", tmp_path / "new.json"]
    files[0].write_text(json.dumps(RECORDS))
    files[1].write_text(json.dumps([RECORDS[2] | {"us": 30.0}]))
    monkeypatch.setattr(sys, "argv", ["experts_table.py", *map(str, files)])
    experts_table.main()
    assert "| 30.0 (2.00) |" in capsys.readouterr().out
