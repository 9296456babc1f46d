"""What the benchmark of counters reads from ncu's table, and how it shows it."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "kernels" / "bench"))
import counters  # type: ignore[import-not-found]

CSV = """==PROF== Connected
"ID","Block Size","Grid Size","gpu__time_duration.sum","dram__bytes_read.sum","not asked for"
"","","","ns","Mbyte",""
"0","(128, 1, 1)","(44, 76, 1)","41,500","74.9","1"
"1","(128, 1, 1)","(32, 76, 1)","25,792","38.0","1"
"""


def test_units_are_microseconds_and_bytes() -> None:
    first, second = counters.read(CSV)
    assert first == {
        "block": "(128, 1, 1)", "grid": "(44, 76, 1)", "us": 41.5, "bytes read": 74.9e6
    }  # fmt: skip
    assert second["us"] == pytest.approx(25.792)


def test_what_is_no_table_is_told() -> None:
    with pytest.raises(RuntimeError, match="permission"):
        counters.read("==ERROR== no permission")


def test_a_launch_is_a_line() -> None:
    rows = list(counters.table([{"width": "3", "us": 41.5}, {"width": "4", "DRAM": 52.07}]))
    assert rows == ["| width | us | DRAM |", "|---|---|---|", "| 3 | 41.5 |  |", "| 4 |  | 52.1 |"]
