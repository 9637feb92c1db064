"""``twell serve``."""

from __future__ import annotations

import shlex
import socket
import sys
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
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TWELL_API_KEY", help="Ask clients for this key, as OpenAI does.", show_default=False),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Let other machines in without a key.")] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name that clients may call this server by, beside addresses.")
    ] = None,
    drain: Annotated[
        float, typer.Option(min=0, max=86400, help="Seconds that answers under way have left on SIGTERM.")
    ] = 30,
) -> None:
    """Serve a model to OpenAI's clients: /v1/completions, /v1/chat/completions, /v1/models.

    To this machine only, unless --host says otherwise: then with --api-key, or --open. Example:
    [bold]twell serve my-run/model --port 8000[/bold]
    """
    try:
        from twell import serve as serving
    except ImportError as error:
        raise RuntimeError(f"serving needs more packages ({error}): pip install 'twell[serve]'") from None
    if api_key is not None and not api_key.strip():
        raise ValueError("the API key is empty: give one to --api-key or TWELL_API_KEY, or neither")
    sock = serving.bind(host, port)
    if not serving.is_local(sock) and api_key is None and not open_:
        raise ValueError(f"other machines can reach {host}: give --api-key, or --open to ask nobody for a key")
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
        hosts = (host, socket.gethostname(), *(allow_host or []))
        server = serving.ModelServer(language_model, tokenizer, called, engine, longest, api_key=api_key, hosts=hosts)
        sock.listen(1024)  # from here on clients may connect
        address = f"http://{_in_url(host)}:{sock.getsockname()[1]}"
        print(f"address:  {address}/v1")
        if not serving.is_local(sock) and api_key is None:
            print("warning:  other machines can reach this address, and no key is asked for (--open)")
        example = _example(address, called, tokenizer.chat_template is not None, api_key is not None)
        print(f"\n{example}\n\nCtrl-C ends it.", flush=True)
        lived = serving.run(server, sock, drain)
    if not lived:
        print("twell: error: the model failed and could not start again; the lines above say why", file=sys.stderr)
        raise typer.Exit(1)
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


def _example(address: str, name: str, can_chat: bool, asks_for_key: bool) -> str:
    import json

    body: dict[str, Any] = {"model": name, "max_tokens": 32}
    if can_chat:
        path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hello"}]}
    else:
        path, body = "/v1/completions", {**body, "prompt": "Once upon a time"}
    key = ' \\\n  -H "Authorization: Bearer $TWELL_API_KEY"' if asks_for_key else ""
    data = shlex.quote(json.dumps(body))
    return f"curl {address}{path} \\\n  -H 'Content-Type: application/json'{key} \\\n  -d {data}"
