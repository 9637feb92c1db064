"""``twell generate``: text from prompts; with ``--compare`` dense against sparse, in tokens and in speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit, Option

from twell.workbench.cli.app import app
from twell.workbench.cli.common import counted_bar, load_model

if TYPE_CHECKING:
    from twell.workbench.bench.timing import Spread
    from twell.workbench.generate import Comparison, Generated, Parting

_HEADING = 60  # characters of a prompt that stand above its text


@app.command("generate")
def generate_text(
    model: Annotated[str, Argument(help="Folder or hub name of a causal language model.")],
    prompt: Annotated[
        list[str] | None, Option("--prompt", "-p", help="Repeatable. Default, or -: standard input.")
    ] = None,
    prompt_file: Annotated[list[Path] | None, Option(help="A file that holds a prompt; repeatable.")] = None,
    chat: Annotated[bool, Option("--chat", help="The prompt is a message, for the model's chat template.")] = False,
    stream: Annotated[
        bool | None,
        Option("--stream/--no-stream", help="Print text as it comes. Default: for one prompt on a terminal."),
    ] = None,
    compare: Annotated[bool, Option("--compare", help="Dense against sparse: same tokens? How fast?")] = False,
    max_new_tokens: Annotated[int | None, Option(min=1, help="Default: 128, or what fits into the context.")] = None,
    temperature: Annotated[
        float | None, Option(min=0, max=100, help="Default: 0, greedy; with --top-p or --top-k 1.")
    ] = None,
    top_p: Annotated[float | None, Option(help="Sample from the most likely tokens that make up this share.")] = None,
    top_k: Annotated[int | None, Option(min=1, help="Sample from this many most likely tokens.")] = None,
    seed: Annotated[int | None, Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = None,
    static_cache: Annotated[
        bool, Option("--static-cache", help="A cache of fixed size; on a GPU transformers then compiles decoding.")
    ] = False,
    device: Annotated[str | None, Option(help="cuda or cpu. Default: cuda where there is one.")] = None,
    dtype: Annotated[str | None, Option(help="float32, bfloat16 or float16. Default: as the model was saved.")] = None,
    repeats: Annotated[int, Option(min=1, help="Timed runs of --compare.")] = 5,
    as_json: Annotated[bool, Option("--json", help="An object for each prompt, or one for --compare.")] = False,
) -> None:
    """Continue a prompt. FFNs with ReLU run sparsely, frozen; text goes to standard output, all else to standard error.

    Example: [bold]twell generate my-run/model --prompt "The ship" --max-new-tokens 64[/bold]

    Dense against sparse: [bold]twell generate my-run/model --prompt "The ship" --compare[/bold]
    """
    from twell.hf.sparsify import sparsify_
    from twell.nn import freeze_
    from twell.train.data import read_utf8
    from twell.workbench import generate as gen

    if stream and (compare or as_json):
        raise ValueError(f"--stream does not go with {'--compare' if compare else '--json'}")
    prompts = [_standard_input() if text == "-" else text for text in prompt or []]
    for path in prompt_file or []:
        prompts.append(_standard_input() if str(path) == "-" else _without_break(read_utf8(path)))
    prompts = prompts or [_standard_input()]
    language_model, tokenizer = load_model(model, device, dtype)
    ids = gen.encode(tokenizer, prompts, chat=chat)
    config = gen.config_for(
        language_model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        static_cache=static_cache,
    )
    facts = {
        "model": model,
        "dtype": str(language_model.dtype).removeprefix("torch."),
        "device": language_model.device.type,
        "static_cache": static_cache,
    }
    if compare:
        dense = gen.dense_twin(language_model)
        freeze_(language_model)
        with counted_bar("generating") as progress:
            result = gen.compare(dense, language_model, ids, config, repeats=repeats, progress=progress)
        if as_json:
            print(json.dumps(_row_of(result, ids, tokenizer, facts, language_model.device, repeats)), flush=True)
        else:
            _print_comparison(result, ids, tokenizer, facts)
        _say_frozen(language_model)
        raise Exit(0 if result.agrees else 1)

    sparse = sparsify_(language_model).summary()
    freeze_(language_model)
    if stream is None:
        stream = sys.stdout.isatty() and len(prompts) == 1 and not as_json
    done: list[Generated] = []
    for some in [[one] for one in ids] if stream else [ids]:
        if stream:
            _print_heading(prompts, len(done))
        on_text = _print_piece if stream else None
        new = gen.generate(language_model, tokenizer, some, config, seed=seed, on_text=on_text)
        for generated in new:  # interrupted, there may be fewer than prompts
            if as_json:
                active = gen.active_neurons(language_model, generated.prompt_ids + generated.ids)
                answer = _answer_of(prompts[len(done)], generated, active)
                print(json.dumps({**answer, **facts, "sparse": sparse}), flush=True)
            elif not stream:
                _print_heading(prompts, len(done))
                print(generated.text, flush=True)
            done.append(generated)
        if stream:
            print(flush=True)
        _say(_times(new))
        if new[-1].finish == "interrupted":
            break
    _say(sparse)
    _say_frozen(language_model)
    if done[-1].finish == "interrupted":
        _say("twell: interrupted")
        raise Exit(130)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _say_frozen(model: Any) -> None:
    """What is frozen by now: on a GPU more than before generating, since layers have planned meanwhile."""
    from twell.nn import freeze_

    if (report := freeze_(model)).layers:
        _say(str(report))


def _standard_input() -> str:
    if sys.stdin.isatty():
        _say("prompt, ended by Ctrl-D on a line of its own:")
    return _without_break(sys.stdin.read())


def _without_break(text: str) -> str:
    """Without the last line break, which the shell or an editor added."""
    return text.removesuffix("\n").removesuffix("\r")


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _print_heading(prompts: list[str], number: int) -> None:
    """The beginning of one of several prompts, above its text."""
    if len(prompts) > 1:
        one_line = " ".join(prompts[number].split())
        shown = one_line if len(one_line) <= _HEADING else f"{one_line[: _HEADING - 3]}..."
        print(f"{'' if number == 0 else chr(10)}==> {shown} <==", flush=True)


def _answer_of(prompt: str, generated: Generated, active: dict[str, float]) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": generated.text,
        "token_ids": generated.ids,
        "finish": generated.finish,
        "prompt_tokens": len(generated.prompt_ids),
        "new_tokens": len(generated.ids),
        "first_token_s": generated.first_token_s and round(generated.first_token_s, 4),
        "tokens_per_s": generated.tokens_per_s and round(generated.tokens_per_s, 1),
        "active_neurons": active,
    }


def _times(done: list[Generated]) -> str:
    """Tokens and seconds of the prompts that one call computed."""
    n_prompt, n_new = sum(len(g.prompt_ids) for g in done), sum(len(g.ids) for g in done)
    line, first = f"{n_prompt:,} prompt tokens, {n_new:,} new", done[0].first_token_s
    if first is None:
        return line
    seconds, later = max(g.seconds for g in done), n_new - len(done)
    rate = f", then {later / (seconds - first):,.1f} tokens/s" if later and seconds > first else ""
    return f"{line} in {seconds:.2f} s: the first after {first:.3f} s{rate}"


# -- dense against sparse -----------------------------------------------------------------------------------


def _row_of(
    result: Comparison, ids: list[list[int]], tokenizer: Any, facts: dict[str, Any], device: Any, repeats: int
) -> dict[str, Any]:
    from twell.workbench.bench import timing

    return {
        "bench": "generate",
        **facts,
        "prompt_tokens": [len(p) for p in ids],
        "new_tokens": [len(row) for row in result.ids["sparse"]],
        "prefill_ms": timing.by_way(result.prefill_ms),
        "decode_ms": timing.by_way(result.step_ms),
        "decode_tokens_per_s": result.tokens_per_s,
        "speedup": {"prefill": _ratio(result.prefill_ms), "decode": _ratio(result.step_ms)},
        "memory": result.memory,
        "agrees": result.agrees,
        "logits_difference": float(f"{result.logits_difference:.3g}"),
        "largest_logit": float(f"{result.largest_logit:.4g}"),
        "partings": [
            {**parting._asdict(), "texts": _texts_of(parting, tokenizer), "verdict": parting.verdict}
            for parting in result.partings
        ],
        "repeats": repeats,
        **timing.environment(device),
    }


def _ratio(times: dict[str, Spread]) -> float | None:
    return round(times["dense"].p50 / times["sparse"].p50, 3) if times else None


def _print_comparison(result: Comparison, ids: list[list[int]], tokenizer: Any, facts: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows = [row for side in result.ids.values() for row in side]
    n_prompt, n_new = sum(map(len, ids)), sum(map(len, result.ids["sparse"]))
    prompts = f"{n_prompt:,} prompt tokens" if len(ids) == 1 else f"{len(ids)} prompts of {n_prompt:,} tokens together"
    cache = ", static cache" if facts["static_cache"] else ""
    print(f"{prompts}, up to {max(map(len, rows)):,} new; {facts['dtype']} on {facts['device']}{cache}")
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in ("", "dense", "sparse", "sparse is"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    for label, times in (("prefill, ms", result.prefill_ms), ("decode, ms a step", result.step_ms)):
        if times:
            table.add_row(label, *(_ms(times[side]) for side in result.ids), f"{_ratio(times):.2f}x")
    if rates := result.tokens_per_s:
        table.add_row("decode, tokens/s", *(f"{rates[side]:,.1f}" for side in result.ids))
    for what, label in (("weights", "weights"), ("frozen", "frozen beside them"), ("pass", "besides, peak")):
        table.add_row(f"{label}, MB", *(f"{result.memory[side][what] / 1e6:,.1f}" for side in result.ids))
    Console().print(table)
    for parting in result.partings:
        which = "" if len(ids) == 1 else f"prompt {parting.prompt + 1}: "
        texts = _texts_of(parting, tokenizer)
        print(
            f"{which}{parting.verdict}: greedy tokens part after {parting.position:,} equal ones, dense goes on with "
            f"{texts['dense']!r} ({parting.dense_token}), sparse with {texts['sparse']!r} ({parting.sparse_token}); "
            f"by {parting.dense_margin:.3g} and {parting.sparse_margin:.3g} of the logits, and rounding explains "
            f"{parting.bound:.2g}"
        )
    agree = "" if result.partings else f"greedy tokens agree, all {n_new:,}; "
    print(f"{agree}logits differ by up to {result.logits_difference:.2g}, the largest is {result.largest_logit:.3g}")


def _ms(spread: Spread) -> str:
    """The median, and half the distance from the 20th to the 80th percentile."""
    return f"{spread.p50:.3g} ±{spread.relative:.0%}"


def _texts_of(parting: Parting, tokenizer: Any) -> dict[str, str]:
    return {"dense": tokenizer.decode([parting.dense_token]), "sparse": tokenizer.decode([parting.sparse_token])}
