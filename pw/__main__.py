"""`python -m pw` is `pw`."""

from pw.cli import main

main()
