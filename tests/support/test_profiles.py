"""`make test` and CI try the same examples every time; a developer's run tries new ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import settings

from support.profiles import load_profile

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    load_profile(os.environ)


@pytest.mark.parametrize(
    ("environ", "same_each_time"),
    [
        ({}, False),
        ({"CI": "true"}, True),
        ({"CI": ""}, False),
        ({"HYPOTHESIS_PROFILE": "ci"}, True),
        ({"CI": "true", "HYPOTHESIS_PROFILE": "random"}, False),
    ],
)
def test_the_profile_follows_the_environment(
    environ: Mapping[str, str], same_each_time: bool
) -> None:
    load_profile(environ)
    assert settings().derandomize is same_each_time
    assert settings().deadline is None
    assert settings().print_blob


def test_this_run_has_one_of_them() -> None:
    name = os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "random")
    assert settings.get_current_profile_name() == name


@pytest.mark.parametrize(
    ("arguments", "profile"), [((), "ci"), (("HYPOTHESIS_PROFILE=random",), "random")]
)
def test_make_chooses_the_profile(arguments: tuple[str, ...], profile: str) -> None:
    show = "show-profile:\n\t@echo $$HYPOTHESIS_PROFILE"
    # What the `make` that runs these tests was told is not for this one.
    of_make = ("HYPOTHESIS_PROFILE", "MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "MAKELEVEL")
    environ = {key: value for key, value in os.environ.items() if key not in of_make}
    done = subprocess.run(
        ("make", "-s", f"--eval={show}", "show-profile", *arguments),
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [profile]
