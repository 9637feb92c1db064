"""``twell serve``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.cli.app import app
from twell.cli.common import load_model


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model. Default: its folder's name, or its run's.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: the model's own.")] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Leave the sparse path out, to compare.")] = False,
    batching: Annotated[
        bool, typer.Option("--batching/--no-batching", help="Compute requests together, or one after the other.")
    ] = True,
    cache_tokens: Annotated[
        int | None,
        typer.Option(min=256, help="Tokens that all requests together keep in memory. Default: by the free memory."),
    ] = None,
) -> None:
    """Serve a model to OpenAI's clients: /v1/completions, /v1/chat/completions, /v1/models.

    Without a password, therefore to this machine only, unless --host says otherwise. Example:
    [bold]twell serve my-run/model --port 8000[/bold]
    """
    try:
        from twell import serve as serving
    except ImportError as error:
        raise RuntimeError(f"serving needs more packages ({error}): pip install 'twell[serve]'") from None
    sock = serving.bind(host, port)
    language_model, tokenizer = load_model(model, device, dtype)
    print(f"model:    {model}, {str(language_model.dtype).removeprefix('torch.')}, on {language_model.device}")
    print(f"sparse:   {_make_sparse(language_model, dense)}", flush=True)
    tokens = cache_tokens or serving.cache_tokens_for(language_model)
    context = serving.context_of(language_model) or tokens
    engine: serving.Engine
    if batching:
        engine, why_not = serving.choose_engine(language_model, tokens)
    else:
        engine, why_not = serving.OneAtATime(language_model), "--no-batching"
    with engine:
        longest = context if why_not else min(context, tokens)
        print(
            f"requests: {f'one at a time ({why_not})' if why_not else 'computed together'}, "
            f"up to {longest:,} tokens each" + ("" if why_not else f", {tokens:,} in all")
        )
        called = name or _name_of(model)
        server = serving.ModelServer(language_model, tokenizer, called, engine, longest)
        sock.listen(1024)  # from here on clients may connect
        address = f"http://{_in_url(host)}:{sock.getsockname()[1]}"
        print(f"address:  {address}/v1")
        if not serving.is_local(sock):
            print("warning:  other machines can reach this address, and no password is asked for")
        print(f"\n{_example(address, called, tokenizer.chat_template is not None)}\n\nCtrl-C ends it.", flush=True)
        serving.run(server, sock)
    print("stopped")


def _make_sparse(model: Any, dense: bool) -> str:
    """Convert the model and freeze it, or make it dense, and say what its layers are."""
    from twell.hf.convert import desparsify_, sparsify_
    from twell.nn import freeze_, sparse_ffns

    if dense:
        return f"no layer of {len(desparsify_(model).rows)} (--dense)"
    summary, frozen = sparsify_(model).summary(), freeze_(model)
    if not frozen.layers:
        return summary
    waits = model.device.type == "cuda" and any(ffn.plan is None for _, ffn in sparse_ffns(model))
    return f"{summary}\nfrozen:   {frozen}{', more once they have planned' if waits else ''}"


def _name_of(model: str) -> str:
    folder = Path(model)
    if not folder.exists():
        return model
    folder = folder.resolve()
    return folder.parent.name if folder.name == "model" else folder.name  # a run keeps it in model/


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _example(address: str, name: str, can_chat: bool) -> str:
    import json

    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    if can_chat:
        path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        path, body = "/v1/completions", {**body, "prompt": "Once upon a time"}
    return f"curl {address}{path} \\\n  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(json.dumps(body))}"
