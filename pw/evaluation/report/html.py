"""The report as one HTML page that loads nothing: styles and pictures are part of it."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from pw.evaluation.report.markdown import facts
from pw.evaluation.report.pictures import Picture
from pw.evaluation.report.tables import Described, findings, tables


def page(described: Described, pictures: Sequence[Picture] = ()) -> str:
    """The whole report.

    Args:
        described: See `pw.evaluation.report.document`.
        pictures: Drawn into the page.
    """
    loader = PackageLoader("pw.evaluation.report", package_path="")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    origin = described["provenance"]
    quality, *others = tables(described)
    drawn = [(picture.name, picture.caption, picture.svg()) for picture in pictures]
    return environment.get_template("page.html.j2").render(
        model=origin["artifact"]["model"],
        command=origin["command"],
        facts=facts(described),
        findings=findings(described),
        quality=quality,
        others=others,
        frontiers=[picture for picture in drawn if picture[0].startswith("frontier")],
        pictures=[picture for picture in drawn if not picture[0].startswith("frontier")],
        protocol=described["protocol"],
    )
