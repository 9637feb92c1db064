"""``twell demo``."""

from __future__ import annotations

from twell.workbench.cli.app import app


@app.command()
def demo() -> None:
    """Show a sparse activation, time a layer and a model sparse and dense, write a page about a small trained model.

    Takes about a minute on two cores; the page is demo-out/report.html. Example: [bold]twell demo[/bold]
    """
    from twell.workbench.demo import run_demo

    run_demo()
