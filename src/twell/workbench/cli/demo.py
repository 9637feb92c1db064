"""``twell demo``."""

from __future__ import annotations

from twell.workbench.cli.app import app
from twell.workbench.cli.common import print_speed_table, progress_bar


@app.command()
def demo() -> None:
    """Pack a sparse activation, time an FFN sparse and dense, train a small sparse model and let it write.

    Takes about two minutes. Example: [bold]twell demo[/bold]
    """
    from twell.workbench.demo import run_demo

    run_demo(progress_bar, print_speed_table)
