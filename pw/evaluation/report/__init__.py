"""The report of an evaluation: one description as data, shown as JSON, markdown, pictures, HTML."""
