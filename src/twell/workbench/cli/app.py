"""The ``twell`` command and its groups, to which the other modules add their commands."""

from __future__ import annotations

from typing import Annotated

import typer

from twell import __version__

app = typer.Typer(
    help="Sparse-activation feed-forward layers, fast and exact.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench_app = typer.Typer(help="Measure dense against sparse, checked before timed.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twell {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
