"""Which examples hypothesis tries: the same ones every time where a failure must mean a change."""

from collections.abc import Mapping

from hypothesis import settings

CI, RANDOM = "ci", "random"


def load_profile(environ: Mapping[str, str]) -> str:
    """Register both profiles and take one; its name.

    Args:
        environ: HYPOTHESIS_PROFILE names it; else `ci` where CI is set, and `random`.
    """
    settings.register_profile(CI, derandomize=True, deadline=None, print_blob=True)
    settings.register_profile(RANDOM, derandomize=False, deadline=None, print_blob=True)
    name = environ.get("HYPOTHESIS_PROFILE") or (CI if environ.get("CI") else RANDOM)
    settings.load_profile(name)
    return name
