from pathlib import Path

import pytest

from pw.config import PrecisionPolicy
from pw.errors import ConfigError
from pw.evaluation.policies import choose_reference, is_fixed, parse_budgets, parse_policies


def test_ranges_and_lists_of_policies() -> None:
    policies = parse_policies("dense, static:2..4,static:own.json,adaptive")
    names = ["dense", "static:2", "static:3", "static:4", "static:own.json", "adaptive"]
    assert [str(policy) for policy in policies] == names
    assert policies[4].path == Path("own.json")
    assert [is_fixed(policy) for policy in policies] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("static:4..2", "a range of widths goes upward: `static:4..2`"),
        ("static:7..9", "static width must be 2 to 8: `static:9`"),
        ("static:2..3,static:3", "names `static:3` twice"),
        ("dense,magic", "unknown precision policy: `magic`"),
        ("", "unknown precision policy: ``"),
    ],
)
def test_lists_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_policies(text)
    assert message in error.value.message


def test_budgets_are_sizes_or_fixed_policies() -> None:
    size, policy = parse_budgets("24MiB, static:3")
    assert (size.name, size.bytes, size.policy) == ("24MiB", 24 << 20, None)
    assert (policy.name, policy.bytes, policy.policy) == (
        "static:3",
        None,
        PrecisionPolicy("static", bits=3),
    )
    with pytest.raises(ConfigError, match="not a memory budget: `adaptive`"):
        parse_budgets("24MiB,adaptive")


def test_the_reference_is_the_wanted_one_or_dense_or_the_first_fixed() -> None:
    policies = parse_policies("adaptive,static:4,dense")
    assert str(choose_reference(policies, None)) == "dense"
    assert str(choose_reference(policies[:2], None)) == "static:4"
    assert str(choose_reference(policies[:1], None)) == "adaptive"
    assert str(choose_reference(policies, "static:4")) == "static:4"
    with pytest.raises(ConfigError, match="--reference is not among the policies: `static:5`"):
        choose_reference(policies, "static:5")
