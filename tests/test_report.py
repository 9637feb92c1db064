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
from twell.workbench.analysis import Analysis, Counted, Example, PlanSummary, TokenType
from twell.workbench.analyze import FFNShape, Options, analyze_trace

EVIL = "</script><img src=x onerror=alert(1)>"
TOKENS = [EVIL, "\n", "\t", " ", "🙂", " the", "<!--", "$data", "&amp;", ""]
TOKENS += ["\u202eabc", "é", "a", " b", "'\"", "\\u003c"]
LAYERS, F, LENGTH = 3, 64, 32
ALL = {"layers", "positions", "text", "tokens", "frequencies", "overlap", "plan", "training", "speed", "break-even"}
ALWAYS = ALL - {"training", "speed", "break-even"}

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
    shapes = [FFNShape(32, True)] * LAYERS
    return analyze_trace(trace, ids, Strings(), shapes=shapes, model_type="test", options=Options(top=12))


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
    assert Analysis.from_json(data["analysis"]) == analysis
    assert data["text"] == "$style.txt"
    assert data["training"]["loss"] == [6.5, None, 5.0]
    assert data["training"]["layers"] == [[40.0, 30.0, 15.0], [20.0, 10.0, None]]
    assert data["training"]["validation"] == [5.5]


def test_no_token_becomes_markup(html: str) -> None:
    page = Page(html)
    assert page.texts["title"] == f"A report {EVIL}"
    assert "<img" not in html.replace("&lt;img", "")
    start = html.index('<script type="application/json"')
    assert "<" not in html[html.index(">", start) + 1 : html.index("</script>", start)]
    assert page.data["analysis"]["sample"]["tokens"][: len(TOKENS)] == TOKENS


def test_figures_without_data_say_how_to_get_it(html: str, analysis: Analysis) -> None:
    page = Page(report.build(analysis, title="bare"))
    assert (page.values("data-figure"), page.values("data-missing")) == (ALWAYS, ALL - ALWAYS)
    assert Page(html).values("data-figure") == ALL
    for command in ("twell train --out run", "twell bench model MODEL --layers --out", "twell bench ffn --out"):
        assert command in page.texts["body"]
    assert page.data["layer_speedups"] is page.data["correlation"] is page.data["training"] is None
    only_ffns = Page(report.build(analysis, title="ffns", speed=SPEED[1:]))
    assert only_ffns.values("data-missing") == {"training"}
    assert "measured speedup" not in only_ffns.texts["body"]


def test_layers_are_timed_only_where_they_are_the_analysed_ones(analysis: Analysis) -> None:
    data = Page(report.build(analysis, title="t", speed=[model_row()])).data
    assert data["layer_speedups"] == [2.0, 1.9, 1.8]
    assert data["correlation"] == pytest.approx(-1)
    fewer = model_row(ffns=model_row()["ffns"][1:])
    assert Page(report.build(analysis, title="t", speed=[fewer])).data["layer_speedups"] is None
    equal = model_row(ffns=[ffn | {"speedup": 1.0} for ffn in model_row()["ffns"]])
    assert Page(report.build(analysis, title="t", speed=[equal])).data["correlation"] is None


def test_rows_of_other_benches_and_old_rows_do_no_harm(analysis: Analysis) -> None:
    old = {k: v for k, v in model_row().items() if k not in ("memory", "joules_per_token", "first_token_ms", "ffns")}
    no_time = {**model_row(), "sparse_ms": {"p20": 0.0, "p50": 0.0, "p80": 0.0}}
    rows = [{"bench": "train"}, {}, old, {"bench": "ffn", "workload": "iid3"}, no_time]
    (measured,) = Page(report.build(analysis, title="t", speed=rows, metrics=[{}])).data["measurements"]
    assert [way["name"] for way in measured["ways"]] == ["dense", "sparse"]
    assert measured["ways"][0]["pass_bytes"] is None
    assert measured["ways"][0]["tokens_per_ms"] == pytest.approx(1024 / 50)


def planned(analysis: Analysis, *dense: bool, width: int = 2048, hidden: int = 5632) -> Analysis:
    plans = [PlanSummary(dense=d, hot=256, cap=32, min_tokens=4096, predicted=1.0 if d else 1.5) for d in dense]
    layers = [dataclasses.replace(x, plan=plan) for x, plan in zip(analysis.layers, plans, strict=True)]
    facts = dataclasses.replace(analysis.facts, width=width, hidden_sizes=[hidden] * LAYERS)
    return dataclasses.replace(analysis, layers=layers, facts=facts)


def test_the_verdict_is_honest(analysis: Analysis) -> None:
    assert "too small" in report.verdict(analysis)
    assert "always run densely" in report.verdict(planned(analysis, True, True, True, hidden=64))
    assert "not sparse enough" in report.verdict(planned(analysis, True, True, True))
    assert "All layers are sparse enough" in report.verdict(planned(analysis, False, False, False))
    some = report.verdict(planned(analysis, True, False, False))
    assert some.startswith("2 of 3 layers are") and "the other 1 would run densely" in some
    for speedup, how in ((0.8, "slower than"), (1.01, "as fast as"), (1.5, "faster than")):
        html = report.build(analysis, title="t", speed=[model_row(speedup=speedup)])
        assert f"the whole model runs {how} dense: {speedup:.2f}x" in html
    random_weights = {k: v for k, v in model_row().items() if k != "model"}
    assert "Measured" not in Page(report.build(analysis, title="t", speed=[random_weights])).texts["body"]


def large() -> Analysis:
    """12 layers of 2048 neurons, a sample of 512 tokens, and rankings as long as they get."""
    patterns = np.random.default_rng(1).random((12, 512, 2048)) < 0.02
    ids = torch.arange(512).view(1, 512) % len(TOKENS)
    shapes, options = [FFNShape(768, True)] * 12, Options(sample_tokens=512)
    base = analyze_trace(named_trace_of(*patterns), ids, Strings(), shapes=shapes, options=options)
    counted = Counted(source="calibration", tokens=10**6, silent=0.01)
    layers = [dataclasses.replace(layer, counted=counted) for layer in base.layers]
    example = Example(sequence=0, position=9, active=99, text="a token in its context, " * 4, start=2, end=7)
    types = [TokenType(id=i, text=f" word{i}", count=9, mean=i / 7, examples=[example] * 3) for i in range(20)]
    return dataclasses.replace(base, layers=layers, most_active=types, least_active=types)


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
        assert figure.locator("table").count() >= 1, name
        if name not in ("tokens", "plan"):
            box = figure.locator("svg").last.bounding_box()
            assert box is not None and box["width"] > 10 and box["height"] > 10, name
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


def test_browser_marks_examples_by_characters(opened: Opened, analysis: Analysis) -> None:
    """Emoji are one character in Python and two units in a script."""
    example = next(t for t in analysis.most_active + analysis.least_active if t.text == "é").examples[0]
    assert "🙂" in example.text[: example.start]
    row = opened.page.locator(f'[data-figure="tokens"] tr[data-id="{TOKENS.index("é")}"]').first
    assert row.locator("mark").first.text_content() == "é"


def counts_shown(opened: Opened) -> list[int]:
    nodes = opened.page.locator("[data-detail] [data-count]")
    shown = [int(text) for text in nodes.locator("text.value").all_text_contents()]
    assert shown == [int(node.get_attribute("data-count") or -1) for node in nodes.all()]
    return shown


def test_browser_shows_the_counts_of_a_token_pointed_at(opened: Opened, analysis: Analysis) -> None:
    active = analysis.sample.active
    for t in (0, 5, 17):
        opened.page.hover(f'.passage [data-token="{t}"]')
        assert counts_shown(opened) == [counts[t] for counts in active]
        assert opened.page.locator("[data-column]").get_attribute("data-column") == str(t)


def test_browser_moves_through_tokens_by_keys(opened: Opened, analysis: Analysis) -> None:
    opened.page.mouse.move(0, 0)
    opened.page.locator('.passage [data-token="0"]').focus()
    for _ in range(4):
        opened.page.keyboard.press("ArrowRight")
    assert counts_shown(opened) == [counts[4] for counts in analysis.sample.active]
    assert opened.page.locator(".passage [tabindex='0']").count() == 1


def test_browser_links_the_matrix_to_the_text(opened: Opened, analysis: Analysis) -> None:
    cover = opened.page.locator(".matrix rect.cover")
    cover.scroll_into_view_if_needed()
    box = cover.bounding_box()
    assert box is not None
    t, layer = 9, 1
    across = (t + 0.5) / len(analysis.sample.tokens)
    opened.page.mouse.move(box["x"] + across * box["width"], box["y"] + box["height"] * (layer + 0.5) / LAYERS)
    assert opened.page.locator(".passage .chosen").get_attribute("data-token") == str(t)
    assert f"layer {layer}: {analysis.sample.active[layer][t]} neurons" in opened.page.locator("#tip").inner_text()


def test_browser_explains_marks_on_focus(opened: Opened, analysis: Analysis) -> None:
    opened.page.locator('[data-figure="layers"] .mark').nth(1).focus()
    assert f"most {analysis.layers[1].max}" in opened.page.locator("#tip").inner_text()
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#tip").is_hidden()


def test_browser_changes_the_curve_with_the_layer(opened: Opened) -> None:
    curve = opened.page.locator("[data-curve]")
    first = curve.get_attribute("d")
    opened.page.select_option('[data-figure="frequencies"] select', "2")
    assert curve.get_attribute("data-curve") == "2"
    assert curve.get_attribute("d") != first
    assert "In layer 2" in opened.page.locator('[data-figure="frequencies"] .finding').inner_text()


def test_browser_highlights_a_layer_by_position(opened: Opened, analysis: Analysis) -> None:
    figure = opened.page.locator('[data-figure="positions"]')
    figure.locator("button").nth(1).click()
    assert figure.locator(".series.chosen").get_attribute("data-layer") == "1"
    assert figure.locator("text.on").count() == len(analysis.positions)


def test_browser_saves_figures(opened: Opened) -> None:
    """Each as an SVG file with its key, that needs nothing of the page."""
    names = []
    for button in opened.page.locator(".save").all():
        with opened.page.expect_download() as download:
            button.click()
        names.append(download.value.suggested_filename)
        saved = ElementTree.fromstring(Path(download.value.path()).read_text(encoding="utf-8"))
        assert saved.tag == "{http://www.w3.org/2000/svg}svg"
        assert not any("var(" in value for node in saved.iter() for value in node.attrib.values())
        if names[-1] == "layers.svg":
            texts = [node.text for node in saved.iter() if node.text]
            assert {"mean", "median", "99th percentile", "active neurons a token"} <= set(texts)
    drawn = ALL - {"tokens", "plan", "speed"} | {"speed-model", "speed-ffn"}
    assert sorted(names) == sorted(f"{name}.svg" for name in drawn)
    assert opened.complaints == []


def test_browser_says_what_is_not_available(opened: Opened) -> None:
    assert "not available" in (opened.page.locator('[data-figure="speed"] table').text_content() or "")


def test_browser_switches_its_colours(browser: Any, path: Path) -> None:
    opened = Opened(browser, path)
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.number(colour)
    opened.page.click("#theme")
    dark = opened.number(colour)
    assert dark != light
    opened.page.reload()
    assert opened.number(colour) == dark, "a choice is kept"
    opened.page.click("#theme")
    assert opened.number(colour) == light
    by_system = Opened(browser, path, scheme="dark")
    assert by_system.number(colour) == dark
    assert opened.complaints == by_system.complaints == []
    opened.context.close()
    by_system.context.close()


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
    one = analyze_trace(silent, torch.tensor([[0, 1], [2, 3]]), Strings(), shapes=[FFNShape(8, False)])
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
