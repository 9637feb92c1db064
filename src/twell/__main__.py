"""``twell`` and ``python -m twell``: the command line, which needs typer and rich."""

import sys


def main() -> None:
    try:
        from twell.workbench import cli
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("twell: error: the command line needs typer and rich: pip install 'twell[cli]'", file=sys.stderr)
        sys.exit(2)
    cli.main()


if __name__ == "__main__":
    main()
