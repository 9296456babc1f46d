import json

import numpy as np
import pytest

from pw.blocks import BlockShape, ExpertGeometry
from pw.errors import ConfigError
from pw.planning.bits_file import read_bits, write_bits

GEOMETRY = ExpertGeometry((1, 4), 3, 2, BlockShape(8, 4), BlockShape(4, 4))


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "bits.json"
    write_bits(path, GEOMETRY, np.arange(12) % 7 + 2)
    return path


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_round_trip_names_blocks_by_the_models_own_layers(written):
    assert read_bits(written, GEOMETRY, 2, 8).tolist() == [2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6]
    content = json.loads(written.read_text())
    assert content["format"] == "pw-bits-1"
    assert content["bits"]["4.0.gate_up"] == 8
    assert [item.name for item in written.parent.iterdir()] == ["bits.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["bits"].pop("4.2.down"), "misses 1 of 12 blocks: `4.2.down`"),
        (lambda c: c["bits"].update({"0.0.down": 3}), "names unknown 1 of 12 blocks: `0.0.down`"),
        (lambda c: c["bits"].update({"1.0.down": 9}), "wants 9 bits for `1.0.down`: .* 2 to 8"),
        (lambda c: c["bits"].update({"1.0.down": 3.0}), "wants 3.0 bits"),
        (lambda c: c["bits"].update({"1.0.down": True}), "wants true bits"),
        (lambda c: c["bits"].update({"1.0.down": None}), "wants null bits"),
        (lambda c: c.update(format="pw-bits-2"), 'format "pw-bits-2": expected `pw-bits-1`'),
        (lambda c: c.pop("format"), "format null"),
        (lambda c: c.update(bits=[3]), "no object `bits`"),
    ],
)
def test_refuses_what_does_not_fit_the_model(written, change, message):
    edit(written, change)
    with pytest.raises(ConfigError, match=message):
        read_bits(written, GEOMETRY, 2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "format null"),
        (b'{"format": "pw-bits-1", "bits": {"1.0.down": 3, "1.0.down": 4}}', "`1.0.down` .* twice"),
    ],
)
def test_refuses_what_is_no_bits_file(written, text, message):
    written.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_bits(written, GEOMETRY, 2, 8)


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read bits file .*: No such file"):
        read_bits(tmp_path / "none.json", GEOMETRY, 2, 8)


def test_writing_needs_every_block(tmp_path):
    with pytest.raises(ValueError, match="expected 12 widths, got 3"):
        write_bits(tmp_path / "bits.json", GEOMETRY, np.full(3, 4))
