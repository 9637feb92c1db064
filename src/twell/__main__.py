"""``python -m twell``: the command line."""

from twell.workbench.cli import main

main()
