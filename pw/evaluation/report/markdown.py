"""The report as markdown, for a repository or a pull request."""

from __future__ import annotations

from collections.abc import Sequence

from pw.evaluation.report.tables import Described, Table, findings, tables


def markdown(described: Described, pictures: Sequence[tuple[str, str]] = ()) -> str:
    """The whole report.

    Args:
        described: See `pw.evaluation.report.document`.
        pictures: (caption, file name) of each picture beside the report.
    """
    origin = described["provenance"]
    lines = [f"# Evaluation of {origin['artifact']['model']}", "", "```", origin["command"], "```"]
    lines += ["", *(f"- {name}: {value}" for name, value in facts(described)), ""]
    lines += [f"- **{finding.sentence}**" for finding in findings(described)]
    for table in tables(described):
        lines += ["", f"## {table.title}", "", *_rows(table)]
        lines += ["", table.note] if table.note else []
        legend = [f"- `{name}`: {meaning}" for name, meaning in table.legend]
        lines += ["", *legend] if legend else []
    lines += ["", f"Protocol: {described['protocol']}", ""]
    for caption, file in pictures:
        lines += ["", f"![{caption}]({file})"]
    return "\n".join(lines).rstrip() + "\n"


def facts(described: Described) -> list[tuple[str, str]]:
    """Where the figures come from, as short lines."""
    origin, text = described["provenance"], described["text"]
    machine, artifact = origin["hardware"], origin["artifact"]
    place = ", ".join(machine["gpus"]) or f"{machine['processor']}, {machine['cores']} cores"
    return [
        ("date", origin["date"]),
        (
            "hardware",
            f"{place}, {machine['memory_bytes'] / 2**30:.0f} GiB, "
            f"torch on {machine['threads']} of them, {machine['platform']}",
        ),
        ("versions", ", ".join(f"{name} {value}" for name, value in origin["versions"].items())),
        (
            "artifact",
            f"{artifact['name']} ({artifact['architecture']}, {artifact['bits'][0]} to "
            f"{artifact['bits'][1]} bits), hash {artifact['hash']}",
        ),
        (
            "text",
            f"{text['name']}, {text['chunks']} chunks of {text['chunk_tokens']} tokens, "
            f"SHA-256 {text['sha256'][:16]}",
        ),
        ("seeds", ", ".join(f"{name} {value}" for name, value in origin["seeds"].items())),
    ]


def _rows(table: Table) -> list[str]:
    """A table in GitHub's form."""
    ruler = ["---"] * table.words + ["---:"] * (len(table.columns) - table.words)
    return ["| " + " | ".join(_escape(row)) + " |" for row in (table.columns, ruler, *table.rows)]


def _escape(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]
