"""``twell tune``."""

from __future__ import annotations

import datetime
import json
from typing import Annotated

import typer

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar


@app.command()
def tune(
    as_json: Annotated[bool, typer.Option("--json", help="The costs as JSON on standard output.")] = False,
) -> None:
    """Measure the costs of this GPU and write them down: layers are planned by them from now on.

    Takes about a minute. Without it an H200's costs are scaled to other GPUs of its generation, and all other GPUs run
    densely; [bold]twell doctor[/bold] tells which. It changes speed, never a result. Example: [bold]twell tune[/bold]
    """
    import torch

    from twell.ops import backends
    from twell.plan import tuned
    from twell.workbench.bench import costs

    if not torch.cuda.is_available():
        raise ValueError("twell tune times kernels on a GPU, and torch sees none here")
    device = torch.device("cuda", torch.cuda.current_device())
    why_not = backends.why_unavailable("triton", device)
    if why_not is not None:
        raise ValueError(f"the kernels do not run here: {why_not}")
    with counted_bar("measuring costs") as progress:
        found = costs.measure(device, progress=progress)
    by_kind = {kind: of._asdict() for kind, of in zip(("inference", "training"), found, strict=True)}
    path = tuned.write(device, by_kind, date=datetime.datetime.now(datetime.UTC).date().isoformat())
    if as_json:
        print(json.dumps({"path": str(path), **by_kind}))
        return
    for kind, numbers in by_kind.items():
        print(f"{kind}: " + ", ".join(f"{name} {value:.4g}" for name, value in numbers.items()))
    print(f"written to {path}; delete it to undo")
