"use strict";
(() => {
  // Everything shown comes from this object and becomes text nodes and attributes, never markup.
  const data = JSON.parse(document.getElementById("data").textContent);
  const { analysis, training, measurements, timed } = data;
  const { layers } = analysis;
  const sizes = analysis.facts.hidden_sizes;

  // ---- Elements -------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";
  const known = (value) => value !== null && value !== undefined;

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) if (known(value)) node.setAttribute(name, value);
    node.append(...children.flat().filter(known));
    return node;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  const text = (x, y, value, anchor, className) =>
    s("text", { x, y, "text-anchor": anchor, class: className }, String(value));
  const line = (x1, y1, x2, y2, className) => s("line", { x1, y1, x2, y2, class: className });
  const rect = (x, y, width, height, className) => s("rect", { x, y, width, height, class: className });
  const circle = (cx, cy, r, className) => s("circle", { cx, cy, r, class: className });
  const explained = (message, ...children) =>
    s("g", { role: "img", "aria-label": message }, s("title", null, message), ...children);

  // ---- Numbers --------------------------------------------------------------------------------------------

  const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 }).format;
  const plain = (value) => (value >= 1000 ? grouped(value) : String(Number(value.toPrecision(3))));
  const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}\u00a0%`;
  const share = (part) => `${Number((100 * part).toPrecision(2))}\u00a0%`; // of any size
  const times = (value) => `${value.toFixed(2)}x`;
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  function short(value) {
    // about three digits, never an exponent
    if (!known(value)) return "–";
    if (value >= 100 || value === 0) return grouped(value);
    return value >= 1 ? value.toFixed(value >= 10 ? 1 : 2) : String(Number(value.toPrecision(2)));
  }

  // ---- Axes -----------------------------------------------------------------------------------------------

  function scaled({ low, high, log }, from, to) {
    const place = log ? Math.log : (value) => value;
    const span = place(high) - place(low) || 1;
    return (value) => from + ((place(value) - place(low)) / span) * (to - from);
  }
  function ticks({ low, high, log }, wanted) {
    if (!log) {
      const rough = (high - low) / wanted || 1;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.7);
      const first = Math.ceil(low / step - 1e-9);
      return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, k) => (first + k) * step);
    }
    let found = [low, high];
    for (const multiples of [[1], [1, 3], [1, 2, 5]]) {
      const denser = [];
      for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
        denser.push(...multiples.map((m) => m * power).filter((at) => at >= low * 0.999 && at <= high * 1.001));
      if (denser.length > 1 && (denser.length <= wanted || multiples.length === 1)) found = denser;
    }
    return found;
  }
  function range(values, bottom) {
    // of an axis: logarithmic where values differ much, else from ``bottom``, or with some room below
    const all = values.filter(known);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    if (low > 0 && high / low > 8) return { low: low * 0.85, high: high * 1.15, log: true };
    const room = (high - low) * 0.06 || 0.5;
    return { low: bottom ?? low - room, high: high + room };
  }
  function spreadOut(wanted, gap, high) {
    // places for labels so that they do not touch
    const order = wanted.map((_, i) => i).sort((a, b) => wanted[b] - wanted[a]);
    const placed = [];
    let limit = high;
    for (const i of order) {
      placed[i] = Math.min(wanted[i], limit);
      limit = placed[i] - gap;
    }
    return placed;
  }

  // ---- Charts ---------------------------------------------------------------------------------------------

  function chart(parent, name, label, height, draw) {
    // drawn for the width there is, and again when that changes; the reader can save it
    const holder = h("div", { class: "chart" });
    const save = h("button", { type: "button", "aria-label": `Save ${name}.svg` }, "Save SVG");
    parent.append(holder, save);
    save.addEventListener("click", () => saveSvg(holder.firstChild, name));
    let drawn = 0;
    const update = () => {
      const width = Math.floor(holder.clientWidth);
      if (!width || width === drawn) return;
      drawn = width;
      const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
      draw(svg, width);
      holder.replaceChildren(svg);
    };
    update();
    new ResizeObserver(update).observe(holder);
  }

  const PAINT = ["fill", "stroke", "stroke-width", "stroke-linejoin", "opacity", "font-family", "font-size"];

  function saveSvg(svg, name) {
    // a copy with the page's colours as attributes: files do not see the page's style
    const copy = svg.cloneNode(true);
    copy.querySelectorAll(".cover").forEach((node) => node.remove());
    svg.after(copy); // styles are computed in the page
    for (const node of copy.querySelectorAll("*")) {
      const style = getComputedStyle(node);
      for (const property of PAINT) node.setAttribute(property, style.getPropertyValue(property));
    }
    const fill = getComputedStyle(document.body).backgroundColor;
    copy.prepend(s("rect", { width: "100%", height: "100%", fill }));
    copy.remove();
    copy.setAttribute("xmlns", SVG);
    const url = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    h("a", { href: url, download: `${name}.svg` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  function colour(i) {
    // from teal to orange; each can be seen on paper and in the dark
    const t = i / Math.max(1, layers.length - 1);
    return `rgb(${[[25, 208], [137, 100], [166, 40]].map(([from, to]) => Math.round(from + t * (to - from)))})`;
  }
  const ofLayers = (points) =>
    layers.map((layer, i) => ({ points: points(layer, i), stroke: colour(i), end: layers.length <= 20 ? i : null }));

  function lineChart(root, name, { label, caption, title, x, y, format = plain, series, rings = [] }) {
    // series: points [x, y], a gap where y is null; a colour or a class; what stands at the end; tip(x, y) for points
    chart(root, name, label, 300, (svg, width) => {
      const [left, right, top, bottom] = [52, width - 72, 28, 258];
      const [sx, sy] = [scaled(x, left, right), scaled(y, bottom, top)];
      for (const at of ticks(y, 6))
        svg.append(line(left, sy(at), right, sy(at), "grid"), text(left - 8, sy(at) + 4, format(at), "end"));
      for (const at of ticks(x, width > 520 ? 10 : 5))
        svg.append(line(sx(at), bottom, sx(at), bottom + 4, "grid"), text(sx(at), bottom + 18, grouped(at), "middle"));
      svg.append(text((left + right) / 2, bottom + 36, caption, "middle"));
      svg.append(text(0, top - 16, title + (y.log ? ", logarithmic" : ""), "start"));
      const shown = series.map((one) => one.points.filter((point) => known(point[1])));
      series.forEach(({ points, stroke, className, tip }, k) => {
        let d = "";
        points.forEach(([px, py], i) => {
          if (known(py)) d += `${i && known(points[i - 1][1]) ? "L" : "M"}${sx(px).toFixed(1)} ${sy(py).toFixed(1)}`;
        });
        svg.append(s("path", { d, stroke, class: `line ${className ?? ""}` }));
        const stride = Math.ceil(shown[k].length / 100);
        for (const [px, py] of tip ? shown[k].filter((_, i) => i % stride === 0) : [])
          svg.append(explained(tip(px, py), circle(sx(px), sy(py), 7, "cover")));
      });
      for (const [px, py, message] of rings) svg.append(explained(message, circle(sx(px), sy(py), 4.5, "ring")));
      const named = series.map((one, k) => [one.end, shown[k].at(-1)]).filter(([end, last]) => known(end) && last);
      const ends = spreadOut(named.map(([, last]) => sy(last[1])), 13, bottom + 4);
      named.forEach(([end, last], k) => svg.append(text(sx(last[0]) + 8, ends[k] + 4, end, "start")));
    });
  }

  // ---- Tables and texts -----------------------------------------------------------------------------------

  function table(headers, rows, caption) {
    // a header that starts with # is of numbers
    const number = (i) => (headers[i].startsWith("#") ? "n" : null);
    const head = headers.map((header, i) => h("th", { scope: "col", class: number(i) }, header.replace("#", "")));
    const cell = (value, i) => h(i ? "td" : "th", { class: number(i) }, value);
    const body = rows.map((row) => h("tr", null, row.map(cell)));
    const parts = [h("caption", null, caption), h("thead", null, h("tr", null, head)), h("tbody", null, body)];
    return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, h("table", null, parts));
  }
  const paragraph = (parent, className, ...children) => parent.append(h("p", { class: className }, ...children));

  const PICTURES = { "\n": "↵", "\t": "⇥", "\r": "␍" };
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu;
  const picture = (c) => PICTURES[c] || `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  const unhidden = (token) => token.replace(HIDDEN, picture);

  function visible(token) {
    // a token by itself, the spaces before it as signs
    return unhidden(token.replace(/^ +/, (spaces) => "␣".repeat(spaces.length))) || "∅";
  }

  // ---- The figures ----------------------------------------------------------------------------------------

  function drawLayers(root) {
    const row = layers.length > 20 ? 20 : 26;
    const high = Math.max(1, ...layers.map((layer) => Math.max(layer.p99, layer.mean)));
    const label = `Active neurons of ${layers.length} layers: mean, median and 99th percentile`;
    chart(root, "layers", label, 24 + row * layers.length + 44, (svg, width) => {
      const [left, right, top, bottom] = [30, width - 54, 24, 24 + row * layers.length];
      const axis = { low: 0, high };
      const x = scaled(axis, left, right);
      svg.append(rect(left, 2, 20, 10, "fill"), text(left + 26, 11, "mean"), line(left + 80, 0, left + 80, 13, "tick"));
      svg.append(text(left + 88, 11, "median"), circle(left + 154, 7, 4, "ring"));
      svg.append(text(left + 164, 11, "99th percentile"));
      for (const at of ticks(axis, width > 520 ? 8 : 4))
        svg.append(line(x(at), top, x(at), bottom, "grid"), text(x(at), bottom + 18, grouped(at), "middle"));
      svg.append(text((left + right) / 2, bottom + 38, "active neurons a token", "middle"));
      layers.forEach(({ mean, p50, p99 }, i) => {
        const y = top + (i + 0.5) * row;
        svg.append(line(x(mean), y, x(p99), y, "stem"), rect(left, y - 6, x(mean) - left, 12, "fill"));
        svg.append(line(x(p50), y - 8, x(p50), y + 8, "tick"), circle(x(p99), y, 4.5, "ring"));
        svg.append(text(left - 8, y + 4, i, "end"), text(width, y + 4, short(mean), "end"));
      });
    });
    const headers = ["layer", "#neurons", "#mean", "#share", "#median", "#p99", "#most", "#silent", "#busiest tenth"];
    const rows = layers.map((layer, i) => [
      `${i} (${layer.name})`,
      grouped(sizes[i]),
      short(layer.mean),
      percent(layer.mean / sizes[i]),
      ...[layer.p50, layer.p99].map(short),
      grouped(layer.max),
      ...[layer.silent, layer.top_tenth].map(percent),
      known(layer.shared) ? percent(layer.shared) : "–",
    ]);
    root.append(table([...headers, "#shared"], rows, "All layers"));
  }

  function drawPositions(root) {
    const { positions } = analysis;
    const total = (k) => sum(layers.map((layer) => layer.by_position[k]));
    const ratio = total(positions.length - 1) ? total(0) / total(positions.length - 1) : 1;
    const amount = ratio > 1 ? `${ratio.toFixed(1)} times` : percent(ratio);
    const differs = `The first token of a sequence wakes ${amount} as many neurons as the last.`;
    paragraph(root, "finding", ratio > 1.1 || ratio < 0.9 ? differs : "The position makes little difference.");
    const series = ofLayers((layer) => layer.by_position.map((value, k) => [positions[k] + 1, value]));
    const tip = (i) => (x, y) => `layer ${i}, from position ${grouped(x)}: ${short(y)}`;
    lineChart(root, "positions", {
      label: `Mean active neurons by position, a line for each of ${layers.length} layers`,
      caption: "from this position on, the first is 1",
      title: "active neurons",
      x: { low: 1, high: positions.at(-1) + 1, log: true },
      y: range(layers.flatMap((layer) => layer.by_position), 0),
      series: series.map((one, i) => ({ ...one, tip: tip(i) })),
    });
  }

  function drawText(root) {
    const { sample_tokens: tokens, sample_active: active } = analysis;
    const totals = tokens.map((_, t) => sum(active.map((counts) => counts[t])));
    const highest = Math.max(1, ...active.flat());
    const spans = tokens.map((token, t) => {
      const blank = /^\s*$/u.test(token);
      const label = `${visible(token)}: ${grouped(totals[t])} neurons`;
      const shown = blank ? visible(token) : unhidden(token);
      const span = h("span", { "data-token": t, role: "img", "aria-label": label }, shown);
      for (const event of ["pointerenter", "pointerdown", "focus"]) span.addEventListener(event, () => choose(t));
      span.addEventListener("keydown", (event) => {
        const to = { ArrowRight: t + 1, ArrowLeft: t - 1, Home: 0, End: tokens.length - 1 }[event.key];
        if (!(to in tokens)) return;
        event.preventDefault();
        spans[to].focus();
      });
      return span;
    });
    const passage = h("p", { class: "passage", role: "group", "aria-label": "The text, coloured by active neurons" });
    spans.forEach((span, t) => {
      passage.append(span);
      if (tokens[t].includes("\n") && !/^\s*\n/u.test(tokens[t + 1] || "")) passage.append("\n"); // no blank lines
    });
    const detail = h("div", { class: "detail", "aria-live": "polite" });
    let chosen = totals.indexOf(Math.max(...totals));

    function choose(t) {
      spans[chosen].classList.remove("chosen");
      chosen = t;
      spans[t].classList.add("chosen");
      spans.forEach((span, k) => span.setAttribute("tabindex", k === t ? 0 : -1)); // one stop of the Tab key
      const bars = active.map((counts, i) => {
        const bar = rect(0, 0, `${(100 * counts[t]) / highest}%`, 10, "fill");
        const count = h("span", { class: "n", "data-count": counts[t] }, grouped(counts[t]));
        return h("li", null, `layer ${i}`, s("svg", { height: 10 }, bar), count);
      });
      const place = 1 + totals.filter((other) => other > totals[t]).length;
      const among = `${place === 1 ? "the most" : `number ${place}`} of ${tokens.length} tokens`;
      const said = `wakes ${grouped(totals[t])} neurons in all: ${among}.`;
      const token = h("p", { class: "token" }, visible(tokens[t]));
      detail.replaceChildren(token, h("p", { class: "note" }, said), h("ul", null, bars));
    }
    function paint(by) {
      const values = by === "all" ? totals : active[Number(by)];
      const low = Math.min(...values);
      const top = [...values].sort((a, b) => a - b)[Math.floor(0.98 * (values.length - 1))]; // outliers pale the rest
      const high = Math.max(low + 1, top);
      spans.forEach((span, t) => span.style.setProperty("--strength", Math.min(1, (values[t] - low) / (high - low))));
      const more = high < Math.max(...values) ? " or more" : "";
      ramp.replaceChildren(grouped(low), h("i"), `${grouped(high)}${more} neurons`);
    }
    const ofLayer = layers.map((_, i) => h("option", { value: i }, `layer ${i}`));
    const select = h("select", null, h("option", { value: "all" }, "all layers"), ofLayer);
    select.addEventListener("change", () => paint(select.value));
    const ramp = h("span", { class: "ramp" });
    paragraph(root, "note", h("label", null, "Colour by ", select), " ", ramp);
    root.append(h("div", { class: "reading" }, passage, detail));
    paint("all");
    choose(chosen);
  }

  function drawTokens(root) {
    const { min_count, most_active, least_active } = analysis;
    const mean = short(sum(layers.map((layer) => layer.mean)));
    const how = "Active neurons in all layers together, the mean over a token's occurrences, for tokens that occur";
    paragraph(root, "note", `${how} at least ${min_count} times. The mean of all tokens is ${mean}.`);
    if (!most_active.length)
      return paragraph(root, "missing", `No token occurs ${min_count} times in this text: a longer text ranks them.`);
    const context = ([before, token, after]) =>
      h("p", { class: "context" }, unhidden(before), h("mark", null, unhidden(token) || "∅"), unhidden(after));
    const contexts = ([first, ...more]) => {
      const folded = h("details", null, h("summary", null, `${more.length} more`), more.map(context));
      return h("div", null, context(first), more.length ? folded : null);
    };
    const ranking = (types, caption) => {
      const row = ({ text: token, mean: neurons, count, examples }) =>
        [h("bdi", { class: "token" }, visible(token)), short(neurons), grouped(count), contexts(examples)];
      return table(["token", "#neurons", "#times", "in context"], types.map(row), caption);
    };
    const pair = [ranking(most_active, "Most neurons"), ranking(least_active, "Fewest neurons")];
    root.append(h("div", { class: "pair" }, pair));
  }

  function drawFrequencies(root) {
    const all = layers.flatMap((layer) => layer.frequencies.filter((f) => f > 0));
    const series = ofLayers(({ ranks, frequencies }) => ranks.map((rank, k) => [rank + 1, frequencies[k] || null]));
    const hot = layers.map(({ plan, ranks, frequencies }, i) => {
      const k = ranks.findLastIndex((rank) => rank < plan.hot);
      const message = `layer ${i}: ${grouped(plan.hot)} hot neurons`;
      return plan.dense || k < 0 || !frequencies[k] ? null : [plan.hot, frequencies[k], message];
    });
    lineChart(root, "frequencies", {
      label: `How often the neurons of ${layers.length} layers fire, from the busiest to the rarest`,
      caption: "neurons, the busiest first",
      title: "share of tokens for which a neuron fires",
      x: { low: 1, high: Math.max(2, ...sizes), log: true },
      y: { low: Math.min(0.1, ...all) * 0.8, high: 1, log: true },
      format: share,
      rings: hot.filter(known),
      series: series.map((one, i) => ({ ...one, tip: (x, y) => `layer ${i}, neuron ${grouped(x)}: ${share(y)}` })),
    });
  }

  function drawPlan(root) {
    const headers = ["layer", "#active", "#hot", "#cap", "#batch from", "#predicted", ...(timed ? ["#measured"] : [])];
    const rows = layers.map(({ mean, plan }, i) => [
      String(i),
      short(mean),
      ...(plan.dense ? ["dense", "–", "–"] : [plan.hot, plan.cap, plan.min_tokens].map(grouped)),
      times(plan.predicted),
      ...(timed ? [times(timed.speedups[i])] : []),
    ]);
    root.append(table(headers, rows, "Plans, and speedup over dense"));
    if (!timed) return;
    const r = known(timed.correlation) ? timed.correlation.toFixed(2).replace("-", "−") : "not defined";
    const what = "Correlation of active neurons and measured speedup over the layers";
    paragraph(root, "note", `Predicted for a GPU; measured on ${timed.machine}. ${what}: ${r}.`);
  }

  function drawTraining(root) {
    if (!training) return;
    const { steps, loss, active, dead, validation } = training;
    const x = { low: steps[0], high: steps.at(-1) };
    const points = (values) => steps.map((step, k) => [step, values[k]]);
    const part = (name, title, values, { bottom, format = plain, end = null, others = [] }) => {
      if (!values.some(known)) return;
      const main = { points: points(values), tip: (step, value) => `step ${grouped(step)}: ${format(value)}`, end };
      const series = [...others, main];
      const y = range(series.flatMap((one) => one.points.map((point) => point[1])), bottom);
      lineChart(root, name, { label: `${title} over training`, caption: "step", title, x, y, format, series });
    };
    const tip = (step, value) => `step ${grouped(step)}: ${short(value)} in validation`;
    const validated = { points: validation, className: "warm", end: "validation", tip };
    const named = training.layers.length <= 6;
    const each = training.layers.map((values, i) => ({
      points: points(values),
      className: "ghost",
      end: named ? `layer ${i}` : null,
    }));
    part("training-loss", "cross-entropy", loss, { end: "training", others: validation.length ? [validated] : [] });
    part("training-active", "active neurons a token and layer", active, { bottom: 0, end: "mean", others: each });
    part("training-dead", "dead neurons", dead, { bottom: 0, format: share });
    if (![loss, active, dead].flat().some(known)) paragraph(root, "missing", "The log has no finite number.");
  }

  function drawSpeed(root) {
    if (!measurements.length) return;
    const ways = ["dense", "compiled", "sparse"].filter((way) => measurements.some(({ ms }) => way in ms));
    const cell = (ms) => (ms ? `${short(ms[1])} (${short(ms[0])} to ${short(ms[2])})` : "–");
    const rows = measurements.map(({ label, machine, ms, tokens, speedup }) => [
      label,
      machine,
      ...ways.map((way) => cell(ms[way])),
      ms.sparse[1] ? short(tokens / ms.sparse[1]) : "–",
      times(speedup),
    ]);
    const headers = ["measurement", "machine", ...ways.map((way) => `#${way}, ms`), "#tokens/ms", "#speedup"];
    paragraph(root, "note", "Median times, with the 20th and 80th percentile. Tokens/ms: of sparse.");
    root.append(table(headers, rows, "Measured times"));
  }

  const drawings = { layers: drawLayers, positions: drawPositions, text: drawText, tokens: drawTokens };
  Object.assign(drawings, { frequencies: drawFrequencies, plan: drawPlan, training: drawTraining, speed: drawSpeed });
  for (const [figure, draw] of Object.entries(drawings)) draw(document.querySelector(`[data-figure="${figure}"]`));
})();
