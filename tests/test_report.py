"""The report: one file that fetches nothing, whose data round-trips, in which no token becomes markup."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from small_models import named_trace_of
from twell.workbench import report
from twell.workbench.analysis import Analysis, PlanSummary, TokenType
from twell.workbench.analyze import analyze_trace

EVIL = "</script><img src=x onerror=alert(1)>"
TOKENS = [EVIL, "\n", "\t", " ", "🙂", " the", "<!--", "$data", "&amp;", ""]
TOKENS += ["\u202eabc", "é", "a", " b", "'\"", "\\u003c"]
LAYERS, F, LENGTH = 3, 64, 32
ALL = {"layers", "positions", "text", "tokens", "frequencies", "plan", "training", "speed"}

METRICS: list[dict[str, Any]] = [
    {"step": 10, "ce_loss": 6.5, "active_mean": 30.0, "dead_share": 0.0, "active/0": 40.0, "active/1": 20.0},
    {"step": 20, "ce_loss": float("nan"), "active_mean": 20.0, "dead_share": 0.01, "active/0": 30.0, "active/1": 10.0},
    {"step": 20, "eval_loss": 5.5},
    {"step": 30, "ce_loss": 5.0, "active_mean": 10.0, "dead_share": 0.02, "active/0": 15.0},
    {"step": 30, "train_runtime": 3.0},
]


def spread(ms: float) -> dict[str, float]:
    return {"p20": 0.9 * ms, "p50": ms, "p80": 1.2 * ms}


def model_row(**other: Any) -> dict[str, Any]:
    ffn = {"tokens": 1024}
    return {
        "bench": "model",
        "workload": "model",
        "model": "runs/demo/model",
        "batch": 8,
        "length": 128,
        "dtype": "float32",
        "dense_ms": spread(50),
        "sparse_ms": spread(40),
        "speedup": 1.25,
        "first_token_ms": {"dense": spread(10), "sparse": spread(9)},
        "memory": {side: {"weights": 100, "copies": 0, "pass": 5_000_000} for side in ("dense", "sparse")},
        "joules_per_token": {"dense": None, "sparse": None},
        "ffns": [
            ffn | {"name": f"model.layers.{i}.mlp", "mean_active": 10.0 + i, "speedup": 2 - 0.1 * i}
            for i in range(LAYERS)
        ],
        "cpu": "A CPU",
        "threads": 1,
    } | other


def ffn_row(workload: str, mean_active: float, speedup: float) -> dict[str, Any]:
    return {
        "bench": "ffn",
        "workload": workload,
        "kind": "gated",
        "M": 16384,
        "D": 2048,
        "F": 5632,
        "dtype": "bfloat16",
        "mean_active": mean_active,
        "dense_ms": spread(1.7),
        "compiled_ms": spread(1.6),
        "sparse_ms": spread(1.6 / speedup),
        "speedup": speedup,
        "gpu": "NVIDIA H200",
    }


SPEED = [model_row(), ffn_row("iid10", 10.0, 2.2), ffn_row("iid60", 60.0, 1.1), ffn_row("skew29", 29.0, 2.0)]


class Strings:
    """A tokenizer whose token i is the i-th of TOKENS."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(TOKENS[i] for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return TOKENS[token]


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """Of random patterns, with every token of TOKENS in the sample."""
    rng = np.random.default_rng(0)
    ids = torch.arange(8 * LENGTH).view(8, LENGTH) % len(TOKENS)
    shares = rng.random((LAYERS, 1, F)) ** 3
    trace = named_trace_of(*(rng.random((LAYERS, ids.numel(), F)) < shares))
    return analyze_trace(trace, ids, Strings(), width=32, gated=True, model_type="test")


@pytest.fixture(scope="module")
def html(analysis: Analysis) -> str:
    return report.build(
        analysis, title=f"A report {EVIL}", model="a & <b>", text="$style.txt", metrics=METRICS, speed=SPEED
    )


class Page(HTMLParser):
    """Elements with their attributes, and the text inside scripts, styles and all."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag in ("script", "style", "title"):
            self.inside.append(attributes.get("id") or tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "title"):
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        name = self.inside[-1] if self.inside else "body"
        self.texts[name] = self.texts.get(name, "") + data

    def values(self, attribute: str) -> set[str]:
        return {value for _, found in self.elements if (value := found.get(attribute)) is not None}

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.texts["data"])


def test_it_asks_nothing_of_the_network(html: str) -> None:
    page = Page(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"img", "iframe", "object", "embed", "base", "form", "audio", "video"}
    assert not page.values("src")
    assert all(href.startswith(("#", "data:")) for href in page.values("href"))
    assert not page.values("style"), "the policy forbids style attributes"
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "url(" not in page.texts["style"]
    assert "@import" not in page.texts["style"]
    own = page.texts["script"].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|innerHTML|outerHTML|insertAdjacent|eval\(", own)
    (policy,) = (a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/=]+'", rules["style-src"])


def test_the_embedded_analysis_round_trips(html: str, analysis: Analysis) -> None:
    data = Page(html).data
    assert data["analysis"] == analysis.to_json()
    assert data["training"]["loss"] == [6.5, None, 5.0]
    assert data["training"]["layers"] == [[40.0, 30.0, 15.0], [20.0, 10.0, None]]
    assert data["training"]["validation"] == [[20, 5.5]]


def test_no_token_becomes_markup(html: str) -> None:
    page = Page(html)
    assert page.texts["title"] == f"A report {EVIL}"
    assert "<img" not in html.replace("&lt;img", "")
    start = html.index('<script type="application/json"')
    assert "<" not in html[html.index(">", start) + 1 : html.index("</script>", start)]
    assert page.data["analysis"]["sample_tokens"][: len(TOKENS)] == TOKENS


def test_figures_without_data_say_how_to_get_it(html: str, analysis: Analysis) -> None:
    page = Page(report.build(analysis, title="bare"))
    assert page.values("data-figure") == Page(html).values("data-figure") == ALL
    assert page.values("data-missing") == {"training", "speed", "layer-times"}
    assert not Page(html).values("data-missing")
    for command in ("twell train --out run", "twell bench model MODEL --layers --out"):
        assert command in page.texts["body"]
    assert page.data["training"] is None and "timed" not in page.data
    only_ffns = Page(report.build(analysis, title="ffns", speed=SPEED[1:]))
    assert only_ffns.values("data-missing") == {"training", "layer-times"}
    assert "measured speedup" not in only_ffns.texts["body"]


def test_layers_are_timed_only_where_they_are_the_analysed_ones(analysis: Analysis) -> None:
    timed = Page(report.build(analysis, title="t", speed=[model_row()])).data["timed"]
    assert timed["speedups"] == [2.0, 1.9, 1.8]
    assert timed["correlation"] == pytest.approx(-1)
    fewer = model_row(ffns=model_row()["ffns"][1:])
    assert "timed" not in Page(report.build(analysis, title="t", speed=[fewer])).data
    equal = model_row(ffns=[ffn | {"speedup": 1.0} for ffn in model_row()["ffns"]])
    assert Page(report.build(analysis, title="t", speed=[equal])).data["timed"]["correlation"] is None


def test_rows_of_other_benches_and_old_rows_do_no_harm(analysis: Analysis) -> None:
    """Rows of a GPU have fields that others lack."""
    of_gpu = ffn_row("iid3", 3.0, 2.0) | {"memory": {"dense": 5, "sparse": 4}, "host_us": {"dense": 1.0}}
    old = {k: v for k, v in model_row().items() if k != "ffns"}
    rows = [{"bench": "train"}, {}, old, {"bench": "ffn", "workload": "iid3"}, of_gpu]
    first, second = Page(report.build(analysis, title="t", speed=rows, metrics=[{}])).data["measurements"]
    assert list(first["ms"]) == ["dense", "sparse"] and first["tokens"] == 1024
    assert second["label"] == "FFN, iid3, 16,384 tokens" and second["ms"]["compiled"][1] == 1.6


def planned(analysis: Analysis, *dense: bool, width: int = 2048, hidden: int = 5632) -> Analysis:
    plans = [PlanSummary(dense=d, hot=256, cap=32, min_tokens=4096, predicted=1.0 if d else 1.5) for d in dense]
    layers = [dataclasses.replace(x, plan=plan) for x, plan in zip(analysis.layers, plans, strict=True)]
    facts = dataclasses.replace(analysis.facts, width=width, hidden_sizes=[hidden] * LAYERS)
    return dataclasses.replace(analysis, layers=layers, facts=facts)


def test_the_verdict_is_honest(analysis: Analysis) -> None:
    assert "too small, or not sparse enough" in report.verdict(analysis)
    assert "All layers are sparse enough" in report.verdict(planned(analysis, False, False, False))
    some = report.verdict(planned(analysis, True, False, False))
    assert some.startswith("2 of 3 layers are") and "the other 1 would run densely" in some
    for speedup, how in ((0.8, "slower than"), (1.01, "as fast as"), (1.5, "faster than")):
        html = report.build(analysis, title="t", speed=[model_row(speedup=speedup)])
        assert f"the whole model runs {how} dense: {speedup:.2f}x" in html
    random_weights = {k: v for k, v in model_row().items() if k != "model"}
    assert "Measured" not in Page(report.build(analysis, title="t", speed=[random_weights])).texts["body"]


def large() -> Analysis:
    """24 layers of 2048 neurons, and rankings as long as they get."""
    patterns = np.random.default_rng(1).random((24, 256, 2048)) < 0.02
    ids = torch.arange(256).view(1, 256) % len(TOKENS)
    base = analyze_trace(named_trace_of(*patterns), ids, Strings(), width=768, gated=True)
    examples = [["a token in its context, " * 3, "and", " what follows"]] * 3
    types = [TokenType(id=i, text=f" word{i}", count=9, mean=i / 7, examples=examples) for i in range(10)]
    return dataclasses.replace(base, most_active=types, least_active=types)


def test_the_page_of_a_large_model_stays_small() -> None:
    rows = [
        {"step": i, "ce_loss": 1 / 3, "active_mean": 2 / 3, **{f"active/{k}": i / 7 for k in range(12)}}
        for i in range(500)
    ]
    html = report.build(large(), title="large", metrics=rows, speed=SPEED * 4)
    assert len(html.encode()) < 1_000_000


def test_write_makes_folders_and_replaces_what_is_there(html: str, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "report.html"
    report.write("old", path)
    report.write(html + "\udcff", path)  # of a file name that is no text
    assert path.read_bytes().decode("utf-8").startswith(html)


# -- in a browser -------------------------------------------------------------------------------------------

_FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
_FLAGS += "--disable-component-update --disable-sync"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=_FLAGS.split())
        yield launched
        launched.close()


class Opened:
    """A page, and what it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def number(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture(scope="module")
def path(html: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write(html, path)
    return path


@pytest.fixture(scope="module")
def opened(browser: Any, path: Path) -> Iterator[Opened]:
    opened = Opened(browser, path)
    yield opened
    opened.context.close()


def test_browser_draws_everything_without_a_complaint_or_a_request(opened: Opened, path: Path) -> None:
    for name in ALL:
        figure = opened.page.locator(f'[data-figure="{name}"]')
        if name in ("layers", "tokens", "plan", "speed"):
            assert figure.locator("tbody tr").count() >= LAYERS, name
        if name not in ("tokens", "plan", "speed"):
            box = figure.locator("svg").last.bounding_box()
            assert box is not None and box["width"] > 10 and box["height"] > 5, name
    assert opened.page.locator("svg text").filter(has_text=re.compile("NaN|undefined|Infinity")).count() == 0
    assert not re.search(r"\b(NaN|undefined|null|Infinity)\b", opened.page.locator("body").inner_text())
    assert not re.search(r"NaN|undefined", opened.page.locator("main").inner_html())
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [path.as_uri()]


def test_browser_shows_tokens_as_text(opened: Opened) -> None:
    assert opened.page.locator("img, main script").count() == 0
    shown = opened.page.locator(".passage [data-token]").all_inner_texts()[: len(TOKENS)]
    expected = {"\n": "↵", "\t": "⇥", " ": "␣", "": "∅", "\u202eabc": "\\u202eabc"}
    assert [s.strip() for s in shown] == [expected.get(token, token).strip() for token in TOKENS]
    assert opened.page.locator("h1").inner_text() == f"A report {EVIL}"
    rows = opened.page.locator('[data-figure="tokens"] tbody th')
    assert {EVIL, "↵", "⇥", "␣"} <= {text.strip() for text in rows.all_text_contents()}


def counts_shown(opened: Opened) -> list[int]:
    return [int(node.get_attribute("data-count") or -1) for node in opened.page.locator("[data-count]").all()]


def test_browser_shows_the_counts_of_a_token_pointed_at(opened: Opened, analysis: Analysis) -> None:
    for t in (0, 5, 17):
        opened.page.hover(f'.passage [data-token="{t}"]')
        assert counts_shown(opened) == [counts[t] for counts in analysis.sample_active]


def test_browser_moves_through_tokens_by_keys(opened: Opened, analysis: Analysis) -> None:
    opened.page.mouse.move(0, 0)
    opened.page.locator('.passage [data-token="0"]').focus()
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    assert counts_shown(opened) == [counts[4] for counts in analysis.sample_active]
    assert opened.page.locator(".passage [tabindex='0']").count() == 1


def test_browser_colours_the_text_by_layer(opened: Opened) -> None:
    strengths = "[...document.querySelectorAll('.passage span')].map((s) => s.style.getPropertyValue('--strength'))"
    by_all = opened.number(strengths)
    opened.page.select_option('[data-figure="text"] select', "1")
    assert opened.number(strengths) != by_all and all(0 <= float(one) <= 1 for one in by_all)
    shades = (
        "[...new Set([...document.querySelectorAll('.passage span')].map((s) => getComputedStyle(s).backgroundColor))]"
    )
    assert len(opened.number(shades)) > 3


def test_browser_draws_the_numbers(opened: Opened, analysis: Analysis) -> None:
    """Bars as long as their means, lines as high as their values, and each point with what it says."""
    bars = opened.page.locator('[data-figure="layers"] .chart rect.fill').all()[1:]  # the first is the key's
    widths = [float(bar.get_attribute("width") or 0) for bar in bars]
    means = [layer.mean for layer in analysis.layers]
    assert widths == pytest.approx([width * widths[0] / means[0] for width in means], rel=1e-3)
    titles = opened.page.locator('[data-figure="positions"] title').all_text_contents()
    assert len(titles) == LAYERS * len(analysis.positions)
    assert titles[0] == f"layer 0, from position 1: {analysis.layers[0].by_position[0]:.1f}"
    assert "step 30: 5" in opened.page.locator('[data-figure="training"] title').all_text_contents()
    row = opened.page.locator('[data-figure="speed"] tbody tr').first.all_inner_texts()[0]
    assert "50.0 (45.0 to 60.0)" in row and "1.25x" in row


def test_browser_saves_figures(opened: Opened) -> None:
    """Each as an SVG file with its key, that needs nothing of the page."""
    names = []
    for button in opened.page.locator("section > button").all():
        with opened.page.expect_download() as download:
            button.click()
        names.append(download.value.suggested_filename)
        saved = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
        assert saved.tag == "{http://www.w3.org/2000/svg}svg"
        assert not any("var(" in value for node in saved.iter() for value in node.attrib.values())
        if names[-1] == "layers.svg":
            texts = [node.text for node in saved.iter() if node.text]
            assert {"mean", "median", "99th percentile", "active neurons a token"} <= set(texts)
    training = ("training-loss", "training-active", "training-dead")
    assert names == [f"{name}.svg" for name in ("layers", "positions", "frequencies", *training)]
    assert opened.complaints == []


def test_browser_follows_the_systems_colours(browser: Any, path: Path) -> None:
    colours = []
    for scheme in ("light", "dark"):
        opened = Opened(browser, path, scheme=scheme)
        colours.append(opened.number("getComputedStyle(document.body).backgroundColor"))
        assert opened.complaints == []
        opened.context.close()
    assert colours[0] != colours[1]


def test_browser_fits_a_phone(browser: Any, path: Path) -> None:
    opened = Opened(browser, path, width=360)
    opened.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert opened.number("document.documentElement.scrollWidth") <= 360
    opened.page.set_viewport_size({"width": 900, "height": 800})
    opened.number("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert opened.number("document.querySelector('[data-figure=layers] .chart svg').clientWidth") > 500, "drawn again"
    assert opened.complaints == []
    opened.context.close()


def test_browser_is_forbidden_to_fetch(browser: Any, path: Path) -> None:
    opened = Opened(browser, path)
    fetched = opened.number("fetch('http://127.0.0.1:9/').then(() => 'fetched', () => 'refused')")
    assert fetched == "refused"
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
    opened.context.close()


def test_browser_draws_odd_analyses(browser: Any, analysis: Analysis, tmp_path: Path) -> None:
    """One layer in which nothing fires, no ranked token, a log without a finite number; many layers."""
    silent = named_trace_of(np.zeros((4, F), dtype=bool))
    one = analyze_trace(silent, torch.tensor([[0, 1], [2, 3]]), Strings(), width=8, gated=False)
    nothing = [{"step": 1, "ce_loss": float("nan")}]
    many = large()
    many = dataclasses.replace(many, facts=dataclasses.replace(many.facts, model_type="<i>"))
    made = {
        "silent": report.build(one, title="", metrics=nothing),
        "many": report.build(many, title="many", metrics=METRICS[:1]),
    }
    for name, page in made.items():
        report.write(page, tmp_path / f"{name}.html")
        opened = Opened(browser, tmp_path / f"{name}.html", width=360)
        assert opened.complaints == []
        assert opened.number("document.documentElement.scrollWidth") <= 360
        assert not re.search(r"NaN|undefined|Infinity", opened.page.locator("main").inner_html())
        opened.context.close()
