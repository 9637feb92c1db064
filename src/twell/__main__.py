"""``python -m twell``: the command line."""

from twell.cli import main

main()
