"use strict";
(() => {
  // Everything shown comes from this object and becomes text nodes and attributes, never markup.
  const data = JSON.parse(document.getElementById("data").textContent);
  const { analysis } = data;
  const { layers } = analysis;
  const sizes = analysis.facts.hidden_sizes;
  const STEPS = 12; // colours of the ramp

  // ---- Elements -------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (known(value) && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter(known));
    return node;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  const text = (x, y, value, className, anchor) =>
    s("text", { x, y, class: className, "text-anchor": anchor }, String(value));
  const centred = (x, y, value, className) => text(x, y, value, className, "middle");
  const rightAligned = (x, y, value, className) => text(x, y, value, className, "end");
  const line = (x1, y1, x2, y2, className) => s("line", { x1, y1, x2, y2, class: className });
  const rect = (x, y, width, height, className) =>
    s("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), class: className });
  const circle = (cx, cy, r, className) => s("circle", { cx, cy, r, class: className });
  const curve = (points, className) => s("path", { d: path(points), class: className });
  const canvas = (width, height, label) =>
    s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });

  function path(points) {
    // a gap where a value is missing
    let d = "";
    let pen = false;
    for (const [x, y] of points) {
      const drawn = known(y) && Number.isFinite(y);
      if (drawn) d += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = drawn;
    }
    return d;
  }

  // ---- Numbers --------------------------------------------------------------------------------------------

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const grouped = (value) => whole.format(value);
  const percent = (share, digits) => `${(100 * share).toFixed(digits ?? (share > 0 && share < 0.1 ? 1 : 0))}\u00a0%`;
  const times = (value) => `${value.toFixed(2)}x`;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const extreme = (values, better) => values.reduce((best, value, i) => (better(value, values[best]) ? i : best), 0);
  const most = (values) => extreme(values, (a, b) => a > b);
  const least = (values) => extreme(values, (a, b) => a < b);

  function known(value) {
    return value !== null && value !== undefined;
  }
  const ifKnown = (value, then, otherwise = "–") => (known(value) ? then(value) : otherwise);

  function short(value) {
    // about three digits, never an exponent
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 100 || value === 0) return grouped(value);
    if (size >= 10) return value.toFixed(1);
    if (size >= 1) return value.toFixed(2);
    return size < 1e-6 ? "0" : String(Number(value.toPrecision(2)));
  }
  const plain = (value) => (Math.abs(value) >= 1000 ? grouped(value) : String(Number(value.toPrecision(4))));

  // ---- Scales and axes ------------------------------------------------------------------------------------

  function linear(low, high, from, to) {
    const span = high - low || 1;
    return (value) => from + ((value - low) / span) * (to - from);
  }
  function logarithmic(low, high, from, to) {
    const scale = linear(Math.log(low), Math.log(high), from, to);
    return (value) => scale(Math.log(value));
  }
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.7);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++)
      found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  function decades(low, high, wanted) {
    // ticks of a logarithmic axis
    let found = [];
    for (const multiples of [[1, 2, 5], [1, 3], [1]]) {
      found = [];
      for (let e = Math.floor(Math.log10(low)) - 1; e <= Math.ceil(Math.log10(high)); e++) {
        for (const m of multiples) {
          const value = Number((m * 10 ** e).toPrecision(3));
          if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
        }
      }
      if (found.length <= wanted && found.length > 1) return found;
    }
    const stride = Math.max(1, Math.ceil(found.length / wanted));
    return found.length ? found.filter((_, i) => i % stride === 0) : [low, high];
  }
  function yAxis(svg, scale, values, left, right, format = plain) {
    for (const value of values) {
      const y = scale(value);
      svg.append(line(left, y, right, y, "grid"), rightAligned(left - 8, y + 4, format(value)));
    }
  }
  function xAxis(svg, scale, values, bottom, caption, { top = null, format = grouped } = {}) {
    // lines up to ``top``, or short ticks; the caption below the middle of the svg's plot
    for (const value of values) {
      const x = scale(value);
      const mark = known(top) ? line(x, top, x, bottom, "grid") : line(x, bottom, x, bottom + 4, "axis");
      svg.append(mark, centred(x, bottom + 18, format(value)));
    }
    svg.append(centred(caption.x, bottom + 36, caption.text));
  }
  function spreadOut(wanted, gap, low, high) {
    // places for labels so that they do not touch
    const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
    const placed = [...wanted];
    order.forEach((i, k) => {
      placed[i] = Math.max(wanted[i], k ? placed[order[k - 1]] + gap : low);
    });
    let limit = high;
    for (const i of [...order].reverse()) {
      placed[i] = Math.min(placed[i], limit);
      limit = placed[i] - gap;
    }
    return placed;
  }
  const shade = (t) => `r${Math.min(STEPS - 1, Math.max(0, Math.floor(t * STEPS)))}`;
  const layerShade = (i) => shade(0.34 + (0.62 * i) / Math.max(1, layers.length - 1)); // dark enough for the page

  // ---- Tokens as text -------------------------------------------------------------------------------------

  const PICTURES = { "\n": "↵", "\t": "⇥", "\r": "␍" };
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu;

  const picture = (c) => PICTURES[c] || `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  const unhidden = (token) => token.replace(HIDDEN, picture);

  function visible(token) {
    // a token by itself, white space as signs
    if (token === "") return "∅";
    return /^\s+$/u.test(token) ? unhidden(token.replace(/ /g, "␣")) : unhidden(token);
  }
  function tokenNode(token) {
    // for tables: the space before a word is shown
    const shown = visible(token);
    const spaces = /^ +/.exec(shown);
    if (!spaces) return h("span", { class: "tok" }, h("bdi", null, shown));
    const n = spaces[0].length;
    return h("span", { class: "tok" }, h("i", null, "␣".repeat(n)), h("bdi", null, shown.slice(n)));
  }

  // ---- Tooltips and keys ----------------------------------------------------------------------------------

  const tip = document.getElementById("tip");
  let owner = null; // the focused mark that the tooltip explains, if any

  function showTip(message, x, y, mark = null) {
    owner = mark;
    tip.textContent = message;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, document.documentElement.clientWidth - width - 8))}px`;
    tip.style.top = `${y - height - 12 < 8 ? y + 18 : y - height - 12}px`;
  }
  function hideTip() {
    tip.hidden = true;
  }
  function tipBeside(node, message) {
    const box = node.getBoundingClientRect();
    showTip(message, box.left + box.width / 2, box.top, node);
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  const followScroll = () => {
    if (owner && owner === document.activeElement && !tip.hidden) tipBeside(owner, tip.textContent); // focus may scroll
    else hideTip();
  };
  window.addEventListener("scroll", followScroll, { passive: true });

  function mark(message, ...children) {
    // a part of a chart with a tooltip, which is also its accessible name
    const node = s("g", { class: "mark", role: "img", "aria-label": message.replace(/\n/g, ", ") }, ...children);
    node.addEventListener("pointermove", (event) => showTip(message, event.clientX, event.clientY));
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("focus", () => tipBeside(node, message));
    node.addEventListener("blur", hideTip);
    return node;
  }
  function roving(nodes) {
    // one stop of the Tab key; arrows move on
    const select = (chosen) => nodes.forEach((node) => node.setAttribute("tabindex", node === chosen ? 0 : -1));
    select(nodes[0]);
    nodes.forEach((node, i) => {
      node.addEventListener("focus", () => select(node));
      node.addEventListener("keydown", (event) => {
        const [to, back] = [i + 1, i - 1];
        const moves = { ArrowRight: to, ArrowDown: to, ArrowLeft: back, ArrowUp: back, Home: 0, End: nodes.length };
        if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        nodes[Math.min(nodes.length - 1, Math.max(0, moves[event.key]))].focus();
      });
    });
  }
  function withMarks(svg, marks) {
    svg.append(...marks);
    roving(marks);
    return svg;
  }

  // ---- Building blocks ------------------------------------------------------------------------------------

  function chart(parent, name, draw) {
    // drawn for the width there is, and again when that changes; with a name, the reader can save it
    const holder = h("div", { class: "chart" });
    parent.append(holder);
    let drawn = 0;
    const update = () => {
      const width = Math.floor(holder.clientWidth);
      if (width && width !== drawn) {
        drawn = width;
        holder.replaceChildren(draw(width));
      }
    };
    update();
    new ResizeObserver(update).observe(holder);
    if (name) {
      const save = h("button", { type: "button", class: "save", "aria-label": `Save ${name}.svg` }, "Save SVG");
      save.addEventListener("click", () => saveSvg(holder, name));
      (holder.closest(".scroll") || holder).after(save);
    }
    const redraw = () => {
      if (drawn) holder.replaceChildren(draw(drawn));
    };
    return { holder, redraw };
  }

  const PAINT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "stroke-linecap", "opacity"];
  const FONT = ["font-family", "font-size", "font-weight", "paint-order"];

  function saveSvg(holder, name) {
    // a copy of the chart with its keys below and the page's colours as attributes: files do not see the page's style
    const figure = holder.closest(".matrix, .figure");
    const copy = holder.firstChild.cloneNode(true);
    copy.querySelectorAll(".cover, .hit, .hit-area").forEach((node) => node.remove());
    holder.append(copy); // styles and sizes are computed in the page
    let x = 0;
    const y = copy.height.baseVal.value + 10;
    for (const sign of figure.querySelectorAll(":scope > .key svg, :scope > .ramp svg")) {
      const width = sign.width.baseVal.value;
      const label = text(x + width + 8, y + 10, sign.parentNode.lastChild.textContent);
      copy.append(fill(sign.cloneNode(true), { x, y }, []), label);
      x += width + 28 + label.getBBox().width;
    }
    const box = copy.getBBox();
    for (const node of copy.querySelectorAll("*")) {
      const style = getComputedStyle(node);
      const properties = node.tagName === "text" ? [...PAINT, ...FONT] : PAINT;
      for (const property of properties) node.setAttribute(property, style.getPropertyValue(property));
    }
    const [left, top, width, height] = [box.x - 12, box.y - 12, box.width + 24, box.height + 24].map(Math.round);
    const paper = getComputedStyle(document.body).backgroundColor;
    copy.prepend(s("rect", { x: left, y: top, width, height, fill: paper }));
    fill(copy, { xmlns: SVG, width, height, viewBox: `${left} ${top} ${width} ${height}` }, []);
    copy.remove();
    const url = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }));
    h("a", { href: url, download: `${name}.svg` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  function table(headers, rows) {
    // a header that starts with # is of numbers
    const number = (i) => (headers[i].startsWith("#") ? "n" : null);
    const head = headers.map((header, i) => h("th", { scope: "col", class: number(i) }, header.replace("#", "")));
    const cell = (value, i) =>
      i === 0 ? h("th", { scope: "row", class: number(i) }, value) : h("td", { class: number(i) }, value);
    const body = rows.map((row) => h("tr", null, row.map(cell)));
    return h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, body));
  }
  const wideTable = (headers, rows, caption) =>
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table(headers, rows));
  const folded = (summary, ...children) => h("details", null, h("summary", null, summary), ...children);

  function asTable(parent, headers, rows, caption) {
    parent.append(folded("These numbers as a table", wideTable(headers, rows, caption)));
  }
  function key(parent, entries) {
    const sign = (marks) => s("svg", { width: 22, height: 12 }, ...marks);
    const items = entries.map(([label, ...marks]) => h("li", null, sign(marks), label));
    parent.append(h("ul", { class: "key", "aria-hidden": "true" }, items));
  }
  const paragraph = (parent, className, ...children) => parent.append(h("p", { class: className }, ...children));

  function chooser(label, options, onChange) {
    const items = options.map(([value, name]) => h("option", { value }, name));
    const select = h("select", null, items);
    select.addEventListener("change", () => onChange(select.value));
    return h("p", { class: "choose" }, h("label", null, `${label} `, select));
  }

  function layerRows(root, name, { label, caption, high, rightOf, tall, format, draw, message }) {
    // a chart with a row for each layer
    chart(root, name, (width) => {
      const row = layers.length > 20 ? tall - 6 : tall;
      const [left, right, top] = [30, width - rightOf(width), 6];
      const bottom = top + row * layers.length;
      const x = linear(0, high, left, right);
      const svg = canvas(width, bottom + 40, label);
      const values = ticks(0, high, width > 520 ? 8 : 4);
      xAxis(svg, x, values, bottom, { x: (left + right) / 2, text: caption }, { top, format });
      const rows = layers.map((layer, i) => {
        const y = top + i * row;
        const middle = y + row / 2;
        const parts = draw(layer, i, x, middle, row, width);
        const cover = rect(0, y, width, row, "cover");
        return mark(message(layer, i), rightAligned(left - 8, middle + 4, i), parts, cover);
      });
      return withMarks(svg, rows);
    });
  }

  // ---- Layers ---------------------------------------------------------------------------------------------

  function drawLayers(root) {
    const means = layers.map((layer) => layer.mean);
    const [top, low] = [most(means), least(means)];
    if (layers.length > 1) {
      const highest = `Layer ${top} has the most active neurons, ${short(means[top])} of ${grouped(sizes[top])}`;
      paragraph(root, "finding", `${highest}; layer ${low} has the fewest, ${short(means[low])}.`);
    }
    key(root, [
      ["mean", rect(0, 1, 20, 10, "bar-fill")],
      ["median", line(10, 0, 10, 12, "tick")],
      ["99th percentile", line(0, 6, 12, 6, "stem"), circle(15, 6, 4, "ring")],
    ]);
    layerRows(root, "layers", {
      label: `Active neurons of ${layers.length} layers: mean, median and 99th percentile`,
      caption: "active neurons a token",
      high: Math.max(1, ...layers.map((layer) => Math.max(layer.p99, layer.mean))),
      rightOf: (width) => (width > 520 ? 130 : 54),
      tall: 26,
      format: grouped,
      draw(layer, i, x, middle, row, width) {
        const bar = Math.min(14, row - 6);
        const wide = width > 520;
        return [
          line(x(layer.mean), middle, x(layer.p99), middle, "stem"),
          rect(x(0), middle - bar / 2, x(layer.mean) - x(0), bar, "bar-fill"),
          line(x(layer.p50), middle - bar / 2 - 2, x(layer.p50), middle + bar / 2 + 2, "tick"),
          circle(x(layer.p99), middle, 4.5, "ring"),
          rightAligned(width - (wide ? 62 : 0), middle + 4, short(layer.mean), "value"),
          wide ? rightAligned(width, middle + 4, percent(layer.mean / sizes[i], 1)) : null,
        ];
      },
      message: (layer, i) =>
        `Layer ${i} (${layer.name})\n` +
        `mean ${short(layer.mean)} of ${grouped(sizes[i])}, ${percent(layer.mean / sizes[i])}\n` +
        `median ${short(layer.p50)}, 90th percentile ${short(layer.p90)}, 99th ${short(layer.p99)}, ` +
        `most ${grouped(layer.max)}\n` +
        `silent on this text: ${percent(layer.silent)} of the neurons`,
    });
    const before = ({ silent, tokens, source }) => `${percent(silent)} in ${grouped(tokens)} tokens (${source})`;
    const counted = layers.some((layer) => layer.counted);
    asTable(
      root,
      ["layer", "name", "#neurons", "#mean", "#median", "#p90", "#p99", "#most", "#silent"].concat(
        counted ? ["silent before"] : [],
      ),
      layers.map((layer, i) => [
        String(i),
        layer.name,
        grouped(sizes[i]),
        ...[layer.mean, layer.p50, layer.p90, layer.p99].map(short),
        grouped(layer.max),
        percent(layer.silent),
        ...(counted ? [ifKnown(layer.counted, before)] : []),
      ]),
      "Active neurons by layer",
    );
  }

  // ---- Positions ------------------------------------------------------------------------------------------

  function drawPositions(root) {
    const buckets = analysis.positions;
    const last = buckets.length - 1;
    const total = (k) => sum(layers.map((layer) => layer.by_position[k]));
    const ratio = total(last) ? total(0) / total(last) : 1;
    const all = layers.flatMap((layer) => layer.by_position);
    const [high, low] = [Math.max(...all) || 1, Math.min(...all)];
    const log = low > 0 && high / low > 8;
    let found = "The position makes little difference.";
    const amount = ratio > 1.1 ? `${ratio.toFixed(1)} times` : percent(ratio);
    if (ratio > 1.1 || ratio < 0.9)
      found = `The first token of a sequence wakes ${amount} as many neurons as the last.`;
    paragraph(root, "finding", found);

    let chosen = null;
    let pointed = null;
    let show = null; // of the chart drawn last
    const update = () => {
      chips.forEach((chip, k) => chip.setAttribute("aria-pressed", String(k === chosen)));
      if (show) show(pointed ?? chosen);
    };
    function selects(node, i, enter, leave) {
      const point = (at) => () => {
        pointed = at;
        update();
      };
      enter.forEach((event) => node.addEventListener(event, point(i)));
      leave.forEach((event) => node.addEventListener(event, point(null)));
      node.addEventListener("click", () => {
        chosen = chosen === i ? null : i;
        update();
      });
      return node;
    }
    const chips = layers.map((_, i) => {
      const attributes = { type: "button", "aria-pressed": "false", "aria-label": `Layer ${i}`, class: layerShade(i) };
      return selects(h("button", attributes, String(i)), i, ["pointerenter", "focus"], ["pointerleave", "blur"]);
    });
    root.append(h("div", { class: "choose", role: "group", "aria-label": "Layers" }, h("span", null, "Layer"), chips));

    chart(root, "positions", (width) => {
      const height = width > 520 ? 320 : 270;
      const [left, right, top, bottom] = [44, width - 30, 16, height - 42];
      const y = log ? logarithmic(low * 0.85, high * 1.15, bottom, top) : linear(0, high * 1.05, bottom, top);
      const x = (k) => left + ((right - left) * k) / Math.max(1, last);
      const svg = canvas(width, height, `Mean active neurons by position, a line for each of ${layers.length} layers`);
      yAxis(svg, y, log ? decades(low * 0.85, high * 1.15, 7) : ticks(0, high * 1.05, 6), left, right);
      const stride = Math.ceil(26 / Math.max(1, x(1) - x(0))); // of labels, where room is scarce
      const caption = { x: (left + right) / 2, text: "position in the sequence, from" };
      const label = (k) => (k % stride ? "" : grouped(buckets[k].first));
      xAxis(svg, x, buckets.map((_, k) => k), bottom, caption, { format: label });
      svg.append(text(left - 36, top - 6, log ? "active neurons, log scale" : "active neurons"));
      const ends = spreadOut(layers.map((layer) => y(layer.by_position[last])), 13, top, bottom);
      const series = layers.map((layer, i) => {
        const points = layer.by_position.map((value, k) => [x(k), y(value)]);
        return s(
          "g",
          { class: `series tinted ${layerShade(i)}`, "data-layer": i },
          curve(points, "line"),
          points.map(([px, py]) => circle(px, py, 2.5, "dot")),
          layers.length <= 20 ? text(right + 8, ends[i] + 4, i) : null,
          selects(curve(points, "hit"), i, ["pointerenter"], ["pointerleave"]),
        );
      });
      const group = s("g", null, series);
      const labels = s("g", { "aria-hidden": "true" });
      svg.append(group, labels);
      show = (i) => {
        group.classList.toggle("dimmed", i !== null);
        series.forEach((node, k) => node.classList.toggle("chosen", k === i));
        const values = i === null ? [] : layers[i].by_position;
        const labelled = (value, k) => text(x(k), y(value) - 9, short(value), "on", k ? "middle" : "start");
        labels.replaceChildren(...values.map(labelled));
      };
      show(pointed ?? chosen);
      return svg;
    });
    const range = ({ first, last: end }) => (first === end ? grouped(first) : `${grouped(first)} to ${grouped(end)}`);
    asTable(
      root,
      ["positions", ...layers.map((_, i) => `#layer ${i}`)],
      buckets.map((bucket, k) => [range(bucket), ...layers.map((layer) => short(layer.by_position[k]))]),
      "Mean active neurons by position and layer",
    );
  }

  // ---- The text -------------------------------------------------------------------------------------------

  function drawText(root) {
    const { tokens, active, start, sequence } = analysis.sample;
    const count = tokens.length;
    const totals = tokens.map((_, t) => sum(active.map((counts) => counts[t])));
    const highest = Math.max(1, ...active.flat());
    let chosen = most(totals);

    const spans = tokens.map((token, t) => {
      const shown = visible(token);
      const blank = /^\s*$/u.test(token);
      const label = `${shown}: ${grouped(totals[t])} neurons`;
      const span = h("span", { "data-token": t, role: "img", "aria-label": label }, blank ? shown : unhidden(token));
      span.classList.toggle("unseen", blank);
      for (const event of ["pointerenter", "pointerdown", "focus"]) span.addEventListener(event, () => choose(t));
      return span;
    });
    const described = "Sample text, coloured by active neurons";
    const passage = h("p", { class: "passage", role: "group", "aria-label": described });
    spans.forEach((span, t) => {
      passage.append(span);
      if (tokens[t].includes("\n") && !/^\s*\n/u.test(tokens[t + 1] || "")) passage.append("\n"); // no blank lines
    });
    roving(spans);

    const name = h("p", { class: "token" });
    const rank = h("p", { class: "sum" });
    const bars = h("div", { class: "bars" });
    const detail = h("div", { class: "detail", "data-detail": "", "aria-live": "polite" }, name, rank, bars);
    const legend = h("div", { class: "ramp" });
    let showColumn = null; // of the matrix drawn last

    function choose(t) {
      spans[chosen].classList.remove("chosen");
      chosen = t;
      spans[t].classList.add("chosen");
      detail.setAttribute("data-token", t);
      name.replaceChildren(tokenNode(tokens[t]));
      const place = 1 + totals.filter((other) => other > totals[t]).length;
      const which = place === 1 ? "the most" : `number ${grouped(place)}`;
      const among = `${which} of ${grouped(count)} tokens shown`;
      rank.textContent = `wakes ${grouped(totals[t])} neurons in all: ${among}. Position ${grouped(start + t)}.`;
      small.redraw();
      if (showColumn) showColumn(t);
    }
    function colour(by) {
      const values = by === "all" ? totals : active[Number(by)];
      const low = Math.min(...values);
      const top = [...values].sort((a, b) => a - b)[Math.floor(0.98 * (count - 1))]; // outliers must not pale the rest
      const high = Math.max(low + 1, top);
      spans.forEach((span, t) => {
        span.classList.remove(...[...span.classList].filter((one) => /^r\d+$/.test(one)));
        span.classList.add(shade((0.999 * (values[t] - low)) / (high - low)));
      });
      const whose = by === "all" ? "neurons of all layers" : `neurons of layer ${by}`;
      const more = Math.max(...values) > high ? "; a few have more" : "";
      drawRamp(legend, (t) => low + (high - low) * t, `${whose}${more}`);
    }
    const choices = [["all", "all layers"], ...layers.map((_, i) => [String(i), `layer ${i}`])];
    root.append(chooser("Colour by", choices, colour), legend, h("div", { class: "reading" }, passage, detail));

    const small = chart(bars, null, (width) => {
      const row = layers.length > 16 ? 13 : 18;
      const left = 26;
      const x = linear(0, Math.max(1, ...active.map((counts) => counts[chosen])), left, width - 38);
      const svg = canvas(width, row * layers.length + 2, "Active neurons of this token by layer");
      active.forEach((counts, i) => {
        const value = counts[chosen];
        const [y, middle] = [i * row, i * row + row / 2 + 4];
        const attributes = { "data-layer": i, "data-count": value, role: "img", "aria-label": `layer ${i}: ${value}` };
        const bar = rect(left, y + 3, Math.max(value ? 1 : 0, x(value) - left), row - 6, "bar-fill");
        const label = text(x(value) + 6, middle, grouped(value), "value");
        svg.append(s("g", attributes, rightAligned(left - 8, middle, i), bar, label));
      });
      return svg;
    });

    const below = h("div", { class: "matrix" }, h("h3", null, "Layer by token"));
    root.append(below);
    const scale = h("div", { class: "ramp" });
    drawRamp(scale, (t) => highest * t * t, "neurons of a layer, colours by the square root");
    const label = "Matrix of layers and tokens; scrolls sideways";
    const scroller = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label });
    below.append(scale, scroller);
    chart(scroller, "text", (width) => {
      const left = 26;
      const many = layers.length > 20;
      const row = many ? 10 : 16;
      const cell = Math.max(width > 700 ? 3.8 : 6, (width - left - 2) / count);
      const high = row * layers.length;
      const wide = Math.ceil(left + cell * count + 2);
      const svg = canvas(wide, high + 22, `Active neurons of ${layers.length} layers for ${count} tokens`);
      svg.setAttribute("role", "img");
      const cells = s("g", { "shape-rendering": "crispEdges" });
      active.forEach((counts, i) => {
        svg.append(rightAligned(left - 8, i * row + row / 2 + 4, many && i % 5 ? "" : i));
        counts.forEach((value, t) => {
          const tint = shade(Math.sqrt(value / highest) * 0.999);
          cells.append(rect(left + t * cell, i * row, cell + 0.3, row - 1, `cell ${tint}`));
        });
      });
      for (const t of ticks(0, count - 1, Math.min(12, wide / 70)))
        svg.append(centred(left + (t + 0.5) * cell, high + 16, grouped(start + t)));
      const frame = rect(0, -1, cell, high + 1, "frame");
      const cover = rect(left, 0, cell * count, high, "cover");
      const follow = (event) => {
        const box = cover.getBoundingClientRect();
        const t = Math.floor(((event.clientX - box.left) / box.width) * count);
        const i = Math.floor(((event.clientY - box.top) / box.height) * layers.length);
        if (!(t in tokens) || !(i in layers)) return;
        if (t !== chosen) choose(t);
        showTip(`${visible(tokens[t])}\nlayer ${i}: ${grouped(active[i][t])} neurons`, event.clientX, event.clientY);
      };
      cover.addEventListener("pointermove", follow);
      cover.addEventListener("pointerdown", follow);
      cover.addEventListener("pointerleave", hideTip);
      svg.append(cells, frame, cover);
      showColumn = (t) => {
        const x = left + t * cell;
        fill(frame, { x, "data-column": t }, []);
        const outside = x < scroller.scrollLeft || x + cell > scroller.scrollLeft + scroller.clientWidth;
        if (outside && !scroller.matches(":hover")) scroller.scrollLeft = x - scroller.clientWidth / 2;
      };
      showColumn(chosen);
      return svg;
    });
    colour("all");
    choose(chosen);
    scroller.scrollLeft = 0;
    const shown = `Tokens ${grouped(start)} to ${grouped(start + count - 1)} of sequence ${grouped(sequence)}.`;
    paragraph(root, "note", shown);
    asTable(
      root,
      ["token", "#position", "#all layers", ...layers.map((_, i) => `#${i}`)],
      tokens.map((token, t) => [
        tokenNode(token),
        ...[start + t, totals[t], ...active.map((counts) => counts[t])].map(grouped),
      ]),
      "Active neurons of each token by layer",
    );
  }

  function drawRamp(holder, count, what) {
    // count: the value at a place between 0 and 1
    const width = 14 * STEPS;
    const svg = s("svg", { width, height: 26, "aria-hidden": "true" });
    for (let k = 0; k < STEPS; k++) svg.append(rect(k * 14, 0, 14, 10, `cell r${k}`));
    for (const [t, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]])
      svg.append(text(t * width, 24, grouped(count(t)), null, anchor));
    holder.replaceChildren(svg, h("span", null, what));
  }

  // ---- Tokens ---------------------------------------------------------------------------------------------

  function drawTokens(root) {
    const mean = short(sum(layers.map((layer) => layer.mean)));
    const { min_count, most_active, least_active } = analysis;
    document.querySelector('[data-lead="tokens"]').textContent =
      "Active neurons in all layers together, as the mean over a token's occurrences, for tokens that occur at least " +
      `${min_count} times. The mean of all tokens is ${mean}.`;
    if (!most_active.length)
      return paragraph(root, "missing", `No token occurs ${min_count} times in this text: a longer text ranks them.`);

    const context = (example) => {
      const letters = Array.from(example.text); // characters, as Python counts them
      const part = (from, to) => unhidden(letters.slice(from, to).join(""));
      const token = h("mark", null, part(example.start, example.end) || "∅");
      return h("p", { class: "context" }, part(0, example.start), token, part(example.end));
    };
    const contexts = ([first, ...more]) => [
      first ? context(first) : null,
      more.length ? folded(`${more.length} more`, more.map(context)) : null,
    ];
    const ranking = (types, caption) => {
      const row = (type) => [tokenNode(type.text), short(type.mean), grouped(type.count), contexts(type.examples)];
      const ranked = table(["token", "#neurons", "#times", "in context"], types.map(row));
      const [body] = ranked.tBodies;
      types.forEach((type, i) => body.rows[i].setAttribute("data-id", type.id));
      ranked.createCaption().textContent = caption;
      if (types.length <= 10) return h("div", null, ranked);
      body.classList.add("hidden-rows");
      const more = h("button", { type: "button" }, `Show all ${types.length}`);
      more.addEventListener("click", () => {
        body.classList.remove("hidden-rows");
        more.remove();
      });
      return h("div", null, ranked, h("p", null, more));
    };
    const pair = [ranking(most_active, "Most neurons"), ranking(least_active, "Fewest neurons")];
    root.append(h("div", { class: "pair" }, pair));
  }

  // ---- Neurons --------------------------------------------------------------------------------------------

  function drawFrequencies(root) {
    let chosen = 0;
    const said = h("p", { class: "finding", "aria-live": "polite" });
    const shares = h("ul", { class: "shares" });
    const choices = layers.map((layer, i) => [String(i), `${i} (${layer.name})`]);
    const choose = (value) => {
      chosen = Number(value);
      update();
    };
    root.append(chooser("Layer", choices, choose), said);
    const low = Math.min(1, ...layers.flatMap((layer) => layer.curve.frequencies.filter((f) => f > 0)));
    const largest = Math.max(...sizes);
    const plot = chart(root, "frequencies", (width) => {
      const height = width > 520 ? 340 : 280;
      const [left, right, top, bottom] = [58, width - 12, 28, height - 42];
      const x = logarithmic(1, Math.max(2, largest), left, right);
      const y = logarithmic(low * 0.8, 1, bottom, top);
      const { curve: points, plan } = layers[chosen];
      const label = `Share of tokens for which neurons of layer ${chosen} fire, from the busiest neuron to the rarest`;
      const svg = fill(canvas(width, height, label), { "data-layer": chosen }, []);
      yAxis(svg, y, decades(low * 0.8, 1, 7), left, right, (value) => `${plain(100 * value)} %`);
      const caption = { x: (left + right) / 2, text: "neurons, the busiest first" };
      xAxis(svg, x, decades(1, largest, width > 520 ? 12 : 6), bottom, caption);
      svg.append(text(0, top - 16, "share of tokens for which a neuron fires"));
      const drawn = ({ ranks, frequencies }, className) =>
        curve(ranks.map((rank, k) => [x(rank + 1), frequencies[k] > 0 ? y(frequencies[k]) : null]), className);
      if (!plan.dense && plan.hot > 0) {
        const end = x(plan.hot);
        svg.append(rect(left, top, end - left, bottom - top, "area"), line(end, top, end, bottom, "axis"));
        svg.append(rightAligned(end - 8, bottom - 10, `${grouped(plan.hot)} hot`, "value"));
      }
      svg.append(...layers.filter((_, i) => i !== chosen).map((other) => drawn(other.curve, "line ghost")));
      svg.append(fill(drawn(points, "line"), { "data-curve": chosen }, []));
      const fired = points.ranks.map((rank, k) => [rank, points.frequencies[k]]).filter(([, f]) => f > 0);
      const stride = Math.max(1, Math.ceil(fired.length / 40));
      const some = fired.filter((_, k) => k % stride === 0 || k === fired.length - 1);
      const marks = some.map(([rank, f]) => {
        const which = `neuron ${grouped(rank + 1)} of ${grouped(sizes[chosen])}, the busiest first`;
        const share = percent(f, f < 0.01 ? 3 : 1);
        return mark(`${which}\nfires for ${share} of the tokens`, circle(x(rank + 1), y(f), 9, "cover"));
      });
      return withMarks(svg, marks);
    });
    function update() {
      const { plan, silent, top_shares } = layers[chosen];
      let hot = "No neuron is hot: each is computed only where it fires.";
      if (plan.dense) hot = "The plan runs this layer densely: it has no hot neurons.";
      else if (plan.hot) hot = `Hot: ${grouped(plan.hot)} of ${grouped(sizes[chosen])} neurons.`;
      const never = silent ? `${percent(silent)} never fire` : "every neuron fires at least once";
      const tenth = `the busiest tenth of the neurons makes ${percent(top_shares["10"])} of all firings`;
      said.textContent = `In layer ${chosen} ${tenth}; ${never}. ${hot}`;
      const item = ([p, share]) => h("li", null, h("b", null, percent(share)), `of firings by the busiest ${p} %`);
      shares.replaceChildren(...Object.entries(top_shares).map(item));
      plot.redraw();
    }
    plot.holder.after(shares);
    update();
    asTable(
      root,
      ["layer", ...Object.keys(layers[0].top_shares).map((p) => `#busiest ${p} %`), "#silent", "#hot"],
      layers.map(({ top_shares, silent, plan }, i) => [
        String(i),
        ...[...Object.values(top_shares), silent].map((share) => percent(share)),
        plan.dense ? "dense" : grouped(plan.hot),
      ]),
      "Shares of all firings by the busiest neurons",
    );
  }

  // ---- Overlap --------------------------------------------------------------------------------------------

  function drawOverlap(root) {
    const pairs = layers.map((layer) => layer.overlap);
    const both = pairs.filter((pair) => pair.neighbours && pair.random);
    if (both.length) {
      const mean = sum(both.map((pair) => pair.neighbours / pair.random)) / both.length;
      const much = `Neighbours share ${mean.toFixed(1)} times as much as random pairs, in the mean of the layers.`;
      paragraph(root, "finding", mean > 1.05 ? much : "Neighbours share hardly more than random pairs.");
    }
    key(root, [
      ["random pairs", circle(11, 6, 4.5, "ring")],
      ["neighbours", circle(11, 6, 5, "dot")],
    ]);
    const high = Math.max(0.01, ...pairs.flatMap((pair) => [pair.neighbours || 0, pair.random || 0])) * 1.05;
    const share = (value) => ifKnown(value, (v) => percent(v, 1), "nothing that could be counted");
    layerRows(root, "overlap", {
      label: "Overlap of active neurons by layer: neighbours against random pairs",
      caption: "shared neurons",
      high,
      rightOf: () => 30,
      tall: 24,
      format: (value) => percent(value, high < 0.05 ? 1 : 0),
      draw: ({ overlap: { random, neighbours } }, i, x, middle) => [
        known(random) && known(neighbours) ? line(x(random), middle, x(neighbours), middle, "stem") : null,
        known(random) ? circle(x(random), middle, 4.5, "ring") : null,
        known(neighbours) ? circle(x(neighbours), middle, 5, "dot") : null,
      ],
      message: ({ overlap: { random, neighbours } }, i) =>
        `Layer ${i}\nneighbours share ${share(neighbours)}\nrandom pairs share ${share(random)}`,
    });
    const cell = (value) => ifKnown(value, (v) => percent(v, 1));
    const rows = pairs.map((pair, i) => [String(i), cell(pair.neighbours), cell(pair.random)]);
    asTable(root, ["layer", "#neighbours", "#random pairs"], rows, "Overlap by layer");
  }

  // ---- Plan -----------------------------------------------------------------------------------------------

  function drawPlan(root) {
    const measured = data.layer_speedups;
    const headers = ["layer", "#active", "#hot", "#cap", "#batch from", "#predicted"];
    if (measured) headers.push("#measured");
    const rows = layers.map(({ mean, plan }, i) => [
      String(i),
      short(mean),
      ...(plan.dense ? ["dense", "–", "–"] : [plan.hot, plan.cap, plan.min_tokens].map(grouped)),
      times(plan.predicted),
      ...(measured ? [times(measured[i])] : []),
    ]);
    root.append(wideTable(headers, rows, "Plan by layer"));
    if (!measured) {
      const [why, command] = data.no_layer_times;
      root.append(h("p", { class: "missing", "data-missing": "layer-times" }, why, " ", h("code", null, command)));
      return;
    }
    paragraph(root, "note", `Predicted for a GPU; measured on ${data.layer_machine}.`);
    const value = ifKnown(data.correlation, (r) => r.toFixed(2).replace("-", "−"));
    const what = "correlation between active neurons and measured speedup";
    const other = "Something other than the number of active neurons decides here.";
    const meaning = data.correlation < -0.5 ? "The fewer fire, the faster." : other;
    const found = `Pearson's ${what}, over the layers: ${value}. ${meaning}`;
    paragraph(root, "note", known(data.correlation) ? found : `The layers are too few or too alike for a ${what}.`);
  }

  // ---- Training -------------------------------------------------------------------------------------------

  function drawTraining(root) {
    const run = data.training;
    const { steps } = run;
    const [start, end] = [steps[0], steps[steps.length - 1]];
    const first = (values) => values.find(known);
    const last = (values) => values.findLast(known);
    const parts = [
      { values: run.loss, title: "cross-entropy", tall: 150, format: short, others: [run.validation] },
      { values: run.active, title: "active neurons a token and layer", tall: 150, format: short, others: run.layers },
      { values: run.dead, title: "dead neurons", tall: 80, format: (value) => percent(value), others: [] },
    ].filter((part) => part.values.some(known));
    const hasActive = run.active.some(known);
    paragraph(root, "lead", "The training log; thin lines are single layers.");
    if (!parts.length) return paragraph(root, "missing", "The log has no finite number.");
    if (run.loss.some(known)) {
      const change = (values) => `from ${short(first(values))} to ${short(last(values))}`;
      const active = hasActive ? `, active neurons ${change(run.active)}` : "";
      paragraph(root, "finding", `Cross-entropy went ${change(run.loss)}${active}.`);
    }
    if (!hasActive) paragraph(root, "note", "The run logged no active neurons.");

    chart(root, "training", (width) => {
      const gap = 34;
      const [left, right] = [50, width - 52];
      const x = linear(start, end, left, right);
      const height = sum(parts.map((part) => part.tall + gap)) + 30;
      const titles = parts.map((part) => part.title).join(", ");
      const svg = canvas(width, height, `Training over ${steps.length} logged steps: ${titles}`);
      const dots = steps.map(() => []);
      let top = gap - 8;
      for (const part of parts) {
        const bottom = top + part.tall;
        const isLoss = part.values === run.loss;
        const isActive = part.values === run.active;
        const all = [part.values, ...part.others].flat().filter(known);
        const high = all.reduce((a, b) => Math.max(a, b), -Infinity);
        const low = all.reduce((a, b) => Math.min(a, b), Infinity);
        const log = isActive && low > 0 && high / low > 8;
        const pad = (high - low) * 0.06 || 0.5;
        let [from, to] = [0, high * 1.08 || 1];
        if (log) [from, to] = [low * 0.9, high * 1.1];
        else if (isLoss) [from, to] = [low - pad, high + pad];
        const y = (log ? logarithmic : linear)(from, to, bottom, top);
        const axis = log ? decades(from, to, 5) : ticks(from, to, part.tall > 100 ? 4 : 2);
        yAxis(svg, y, axis, left, right, part.format === short ? plain : part.format);
        svg.append(text(left - 42, top - 10, part.title + (log ? ", log scale" : ""), "value"));
        const drawn = (values, className) =>
          curve(steps.map((step, k) => [x(step), ifKnown(values[k], y, null)]), className);
        if (isActive) {
          svg.append(...part.others.map((values) => drawn(values, "line ghost")));
          const final = part.others.map((values) => last(values) ?? 0);
          const named = final.length <= 6 ? final.map((_, i) => i) : [...new Set([most(final), least(final)])];
          const ends = spreadOut(named.map((i) => (final[i] ? y(final[i]) : bottom)), 13, top, bottom + 8);
          svg.append(...named.map((i, k) => text(right + 8, ends[k] + 4, `layer ${i}`)));
        }
        svg.append(drawn(part.values, "line"));
        if (isLoss && run.validation.some(known)) {
          const points = run.validation_steps.map((step, k) => [step, run.validation[k]]);
          const inside = points.filter(([step, value]) => known(value) && step >= start && step <= end);
          svg.append(...inside.map(([step, value]) => circle(x(step), y(value), 4, "warm")));
          svg.append(circle(right - 78, top - 14, 4, "warm"), text(right - 70, top - 10, "validation"));
        }
        part.values.forEach((value, k) => {
          if (known(value)) dots[k].push([x(steps[k]), y(value)]);
        });
        top = bottom + gap;
      }
      const bottom = top - gap;
      xAxis(svg, x, ticks(start, end, width > 520 ? 8 : 4), bottom, { x: (left + right) / 2, text: "step" });
      const cursor = s("g", { "aria-hidden": "true" });
      const each = (right - left) / Math.max(1, steps.length - 1);
      const validation = new Map(run.validation_steps.map((at, k) => [at, run.validation[k]]));
      const marks = steps.map((at, k) => {
        const values = parts.map((part) => `${part.title} ${ifKnown(part.values[k], part.format, "not logged")}`);
        const lines = [`step ${grouped(at)}`, ...values];
        if (known(validation.get(at))) lines.push(`validation ${short(validation.get(at))}`);
        const node = mark(lines.join("\n"), rect(x(at) - each / 2, 0, Math.max(2, each), bottom, "hit-area"));
        const points = dots[k].map(([px, py]) => circle(px, py, 4, "dot"));
        const show = () => cursor.replaceChildren(line(x(at), 10, x(at), bottom, "cursor"), ...points);
        for (const enter of ["pointerenter", "focus"]) node.addEventListener(enter, show);
        for (const leave of ["pointerleave", "blur"]) node.addEventListener(leave, () => cursor.replaceChildren());
        return node;
      });
      svg.append(cursor);
      return withMarks(svg, marks);
    });
    asTable(
      root,
      ["step", ...parts.map((part) => `#${part.title}`)],
      steps.map((step, k) => [grouped(step), ...parts.map((part) => ifKnown(part.values[k], part.format))]),
      "The training log",
    );
  }

  // ---- Speed ----------------------------------------------------------------------------------------------

  function drawSpeed(root) {
    const { measurements } = data;
    const machines = [...new Set(measurements.map((one) => one.machine))];
    const several = machines.length > 1;
    const how = "Time for the same work, as a share of dense; shorter is faster.";
    const spread = "The line at the end of a bar spans the 20th to the 80th percentile.";
    paragraph(root, "lead", `${how} ${spread} ${several ? "" : `${machines[0]}.`}`);
    const groups = [
      ["Whole model", "speed-model", measurements.filter((one) => one.whole_model)],
      ["One FFN", "speed-ffn", measurements.filter((one) => !one.whole_model)],
    ].filter(([, , some]) => some.length);
    for (const [title, name, some] of groups) {
      const group = h("div", { class: "figure" }, groups.length > 1 ? h("h3", null, title) : null);
      root.append(group);
      const first = some.slice(0, data.measurements_drawn);
      chart(group, name, (width) => drawBars(first, width, several));
      if (some.length > first.length)
        paragraph(group, "note", `The first ${first.length} of ${some.length} measurements; all are in the table.`);
    }
    const once = (k, value) => (k ? "" : value);
    const megabytes = (bytes) => ifKnown(bytes, (n) => `${short(n / 1e6)} MB`, "not available");
    const rows = measurements.flatMap((one) =>
      one.ways.map((way, k) => [
        once(k, one.label),
        ...(several ? [once(k, one.machine)] : []),
        way.name,
        short(way.ms[1]),
        short(way.tokens_per_ms),
        short(way.first_token_ms),
        megabytes(way.pass_bytes),
        megabytes(way.copied_bytes),
        ifKnown(way.joules_per_token, (joules) => short(1000 * joules), "not available"),
        way.name === "sparse" ? times(one.speedup) : "",
      ]),
    );
    const headers = ["measurement", ...(several ? ["machine"] : []), "way", "#ms", "#tokens/ms", "#first token, ms"];
    headers.push("#memory of a pass", "#copied weights", "#mJ a token", "#speedup");
    const full = wideTable(headers, rows, "Measured times, memory and energy");
    root.append(rows.length <= 8 ? full : folded("All measurements: tokens/ms, memory, energy", full));
  }
  function wrapped(message, letters) {
    // SVG does not break lines
    const rows = [""];
    for (const word of message.split(" ")) {
      if (rows[rows.length - 1] && rows[rows.length - 1].length + word.length >= letters) rows.push("");
      rows[rows.length - 1] += (rows[rows.length - 1] && " ") + word;
    }
    return rows;
  }
  function drawBars(measurements, width, wantsMachine) {
    const wide = width > 620;
    const [left, right, bar, step] = [wide ? 74 : 68, width - (wide ? 220 : 92), 15, 20];
    const high = Math.max(1, ...measurements.flatMap((one) => one.ways.map((way) => way.ms[2] / one.ways[0].ms[1])));
    const x = linear(0, high, left, right);
    const parts = [];
    const marks = [];
    let y = 0;
    for (const one of measurements) {
      const rows = wrapped(wantsMachine ? `${one.label}, ${one.machine}` : one.label, (width - 60) / 7.4);
      rows.forEach((row, k) => parts.push(text(0, y + 14 + 16 * k, row, "on")));
      y += 16 * (rows.length - 1);
      parts.push(rightAligned(width, y + 14, times(one.speedup), "on"));
      y += 22;
      for (const way of one.ways) {
        const [low, middle, top] = way.ms.map((ms) => x(ms / one.ways[0].ms[1]));
        const centre = y + bar / 2;
        const [fast, median, slow] = way.ms.map(short);
        const speed = `${short(way.tokens_per_ms)} tokens/ms`;
        const node = mark(
          `${one.label}, ${way.name}\n${median} ms (${fast} to ${slow})\n${speed}`,
          rightAligned(left - 8, centre + 4, way.name),
          rect(left, y, middle - left, bar, way.name === "sparse" ? "bar-fill" : "bar-soft"),
          line(low, centre, top, centre, "whisker"),
          line(low, centre - 3, low, centre + 3, "whisker"),
          line(top, centre - 3, top, centre + 3, "whisker"),
          rightAligned(width, centre + 4, wide ? `${median} ms · ${speed}` : `${median} ms`, "value"),
          rect(0, y - 2, width, step, "cover"),
        );
        marks.push(node);
        y += step;
      }
      y += 18;
    }
    const svg = canvas(width, y - 10, "Times of dense and sparse computation");
    svg.append(...parts);
    return withMarks(svg, marks);
  }

  function drawBreakEven(root) {
    const found = data.break_even;
    const families = Object.entries(found.families);
    paragraph(root, "lead", `Speedup of one FFN against its mean active neurons. ${found.shape}.`);
    if (known(found.at)) {
      const at = `${grouped(found.at)} active a token (${found.measured ? "measured" : "predicted"})`;
      paragraph(root, "finding", `If all neurons fire equally often, sparse stops paying at ${at}.`);
    }
    const classes = { "uniform workloads": "dot", "skewed workloads": "warm" };
    const point = (label, cx, cy) => circle(cx, cy, 4.5, classes[label] || "ring");
    key(root, [
      ...families.map(([label]) => [label, point(label, 11, 6)]),
      ...(found.predicted.length ? [["uniform, predicted", curve([[0, 6], [22, 6]], "line dashed")]] : []),
      ...(found.same_shape ? [["this model's layers", line(11, 2, 11, 12, "tick")]] : []),
    ]);
    const own = found.same_shape ? layers.map((layer) => layer.mean).filter((mean) => mean > 0) : [];
    const points = [...families.flatMap(([, some]) => some), ...found.predicted];
    const across = [...points.map(([active]) => active), ...own, ...(known(found.at) ? [found.at] : [])];
    const speedups = points.map(([, speedup]) => speedup);
    const [low, high] = [Math.min(...across) * 0.85, Math.max(...across) * 1.15];
    const [slowest, fastest] = [Math.min(0.7, ...speedups), Math.max(1.2, ...speedups) * 1.05];
    chart(root, "break-even", (width) => {
      const height = width > 520 ? 330 : 280;
      const [left, right, top, bottom] = [44, width - 24, 16, height - 42];
      const x = logarithmic(low, high, left, right);
      const y = linear(slowest, fastest, bottom, top);
      const svg = canvas(width, height, "Speedup of one FFN against mean active neurons");
      yAxis(svg, y, ticks(slowest, fastest, 6), left, right, (value) => `${Number(value.toFixed(2))}x`);
      const caption = { x: (left + right) / 2, text: "mean active neurons a token, log scale" };
      xAxis(svg, x, decades(low, high, width > 520 ? 10 : 5), bottom, caption, { format: plain });
      svg.append(line(left, y(1), right, y(1), "one"), rightAligned(right, y(1) + 16, "dense"));
      if (known(found.at)) svg.append(line(x(found.at), top, x(found.at), bottom, "one"));
      const drawn = (some, className) => curve(some.map(([active, speedup]) => [x(active), y(speedup)]), className);
      if (found.predicted.length) svg.append(drawn(found.predicted, "line dashed"));
      const marks = families.flatMap(([label, some]) => {
        if (classes[label]) svg.append(drawn(some, `line ${classes[label] === "warm" ? "warm" : ""}`));
        return some.map(([active, speedup]) => {
          const [px, py] = [x(active), y(speedup)];
          const message = `${label}\n${short(active)} active: ${times(speedup)}`;
          return mark(message, point(label, px, py), circle(px, py, 10, "cover"));
        });
      });
      svg.append(...own.map((mean) => line(x(mean), bottom - 9, x(mean), bottom, "tick")));
      return withMarks(svg, marks);
    });
    const row = (label, [active, speedup]) => [label, short(active), times(speedup)];
    const rows = families.flatMap(([label, some]) => some.map((one) => row(label, one)));
    asTable(root, ["workload", "#mean active", "#speedup"], rows, "Speedup against mean active neurons");
  }

  // ---- Theme ----------------------------------------------------------------------------------------------

  const page = document.documentElement;
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (page.dataset.theme ? page.dataset.theme === "dark" : system.matches);
  const nameButton = () => {
    button.textContent = isDark() ? "Light" : "Dark";
  };
  try {
    const kept = localStorage.getItem("twell-theme");
    if (["light", "dark"].includes(kept)) page.dataset.theme = kept;
  } catch {
    /* this browser keeps nothing */
  }
  button.addEventListener("click", () => {
    page.dataset.theme = isDark() ? "light" : "dark";
    nameButton();
    try {
      localStorage.setItem("twell-theme", page.dataset.theme);
    } catch {
      /* this browser keeps nothing */
    }
  });
  system.addEventListener("change", nameButton);
  nameButton();

  // ---- All of it ------------------------------------------------------------------------------------------

  const drawings = {
    layers: drawLayers,
    positions: drawPositions,
    text: drawText,
    tokens: drawTokens,
    frequencies: drawFrequencies,
    overlap: drawOverlap,
    plan: drawPlan,
    training: drawTraining,
    speed: drawSpeed,
    "break-even": drawBreakEven,
  };
  for (const [figure, draw] of Object.entries(drawings)) {
    const root = document.querySelector(`[data-figure="${figure}"]`);
    if (root) draw(root);
  }
})();
