"use strict";
(() => {
  // Everything that is shown comes from this object, as text nodes and attributes: never as markup.
  const data = JSON.parse(document.getElementById("data").textContent);
  const analysis = data.analysis,
    layers = analysis.layers,
    sizes = analysis.facts.hidden_sizes;
  const STEPS = 12; // colours of the ramp

  // ---- Elements -------------------------------------------------------------------------------------------

  const SVG = "http://www.w3.org/2000/svg";

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  }
  const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  function text(x, y, value, attributes) {
    return s("text", { x, y, ...attributes }, String(value));
  }
  const line = (x1, y1, x2, y2, className) => s("line", { x1, y1, x2, y2, class: className });
  const rect = (x, y, width, height, className) =>
    s("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), class: className });
  const circle = (cx, cy, r, className) => s("circle", { cx, cy, r, class: className });

  function canvas(width, height, label) {
    return s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label });
  }

  // ---- Numbers and scales ---------------------------------------------------------------------------------

  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const grouped = (value) => whole.format(value);
  const percent = (share, digits) => `${(100 * share).toFixed(digits ?? (share > 0 && share < 0.1 ? 1 : 0))}\u00a0%`;
  const times = (value) => `${value.toFixed(2)}x`;
  const known = (value) => value !== null && value !== undefined;

  function short(value) {
    // about three digits, never an exponent
    if (!known(value)) return "–";
    const size = Math.abs(value);
    if (size >= 100 || value === 0) return grouped(value);
    if (size >= 10) return value.toFixed(1);
    if (size >= 1) return value.toFixed(2);
    return size < 1e-6 ? "0" : String(Number(value.toPrecision(2)));
  }

  const plain = (value) => (Math.abs(value) >= 1000 ? grouped(value) : String(Number(value.toPrecision(4)))); // of an axis

  function linear(low, high, from, to) {
    const span = high - low || 1;
    return (value) => from + ((value - low) / span) * (to - from);
  }
  function logarithmic(low, high, from, to) {
    const scale = linear(Math.log(low), Math.log(high), from, to);
    return (value) => scale(Math.log(value));
  }
  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted || 1,
      power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.7);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high * (1 + 1e-9); k++)
      found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  function decades(low, high, wanted) {
    // ticks of a logarithmic axis
    for (const multiples of [[1, 2, 5], [1, 3], [1]]) {
      const found = [];
      for (let e = Math.floor(Math.log10(low)) - 1; e <= Math.ceil(Math.log10(high)); e++) {
        for (const m of multiples) {
          const value = Number((m * 10 ** e).toPrecision(3));
          if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
        }
      }
      if (found.length <= wanted && found.length > 1) return found;
      if (multiples.length === 1) {
        const stride = Math.max(1, Math.ceil(found.length / wanted));
        return found.length ? found.filter((_, i) => i % stride === 0) : [low, high];
      }
    }
    return [];
  }
  function path(points) {
    // gaps where a value is missing
    let d = "",
      pen = false;
    for (const [x, y] of points) {
      if (!known(y) || !Number.isFinite(y)) {
        pen = false;
        continue;
      }
      d += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    }
    return d;
  }
  const shade = (t) => `r${Math.min(STEPS - 1, Math.max(0, Math.floor(t * STEPS)))}`;
  const layerShade = (i) => shade(0.34 + (0.62 * i) / Math.max(1, layers.length - 1)); // readable on the page

  // ---- Tokens as text -------------------------------------------------------------------------------------

  const PICTURES = { "\n": "↵", "\t": "⇥", "\r": "␍" };
  const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/gu;

  const picture = (c) => PICTURES[c] || `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  const unhidden = (token) => token.replace(HIDDEN, picture);

  function visible(token) {
    // what a reader can see of a token by itself
    if (token === "") return "∅";
    return /^\s+$/u.test(token) ? unhidden(token.replace(/ /g, "␣")) : unhidden(token);
  }
  function tokenNode(token) {
    // for tables: the space before a word shows
    const shown = visible(token),
      spaces = /^ +/.exec(shown);
    if (!spaces) return h("span", { class: "tok" }, h("bdi", null, shown));
    return h(
      "span",
      { class: "tok" },
      h("i", null, "␣".repeat(spaces[0].length)),
      h("bdi", null, shown.slice(spaces[0].length)),
    );
  }

  // ---- What is pointed at ---------------------------------------------------------------------------------

  const tip = document.getElementById("tip");

  let owner = null; // the focused mark that it is of, if any

  function showTip(message, x, y, of) {
    owner = of || null;
    tip.textContent = message;
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 12, document.documentElement.clientWidth - width - 8))}px`;
    tip.style.top = `${y - height - 12 < 8 ? y + 18 : y - height - 12}px`;
  }
  const hideTip = () => {
    tip.hidden = true;
  };
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hideTip();
  });
  window.addEventListener(
    "scroll",
    () => {
      if (owner && owner === document.activeElement && !tip.hidden)
        besideFocus(owner, tip.textContent); // focus may scroll
      else hideTip();
    },
    { passive: true },
  );

  function besideFocus(node, message) {
    const box = node.getBoundingClientRect();
    showTip(message, box.left + box.width / 2, box.top, node);
  }

  function explained(node, message) {
    // a mark with a tooltip, which is also its name
    fill(node, { role: "img", "aria-label": message.replace(/\n/g, ", ") }, []);
    node.addEventListener("pointermove", (event) => showTip(message, event.clientX, event.clientY));
    node.addEventListener("pointerleave", hideTip);
    node.addEventListener("focus", () => besideFocus(node, message));
    node.addEventListener("blur", hideTip);
    return node;
  }

  function roving(nodes, perRow) {
    // one stop of the Tab key; arrows move on
    nodes.forEach((node, i) => {
      node.setAttribute("tabindex", i === 0 ? 0 : -1);
      node.addEventListener("focus", () =>
        nodes.forEach((other) => other.setAttribute("tabindex", other === node ? 0 : -1)),
      );
      node.addEventListener("keydown", (event) => {
        const moves = {
          ArrowRight: i + 1,
          ArrowDown: i + (perRow || 1),
          ArrowLeft: i - 1,
          ArrowUp: i - (perRow || 1),
          Home: 0,
          End: nodes.length - 1,
        };
        if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        nodes[Math.min(nodes.length - 1, Math.max(0, moves[event.key]))].focus();
      });
    });
  }

  // ---- Building blocks ------------------------------------------------------------------------------------

  const place = (name) => document.querySelector(`[data-figure="${name}"]`);

  function chart(parent, draw) {
    // drawn for the width there is, and again when that changes
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
    return {
      redraw() {
        if (drawn) holder.replaceChildren(draw(drawn));
      },
      holder,
    };
  }

  function table(headers, rows, caption) {
    // a header that starts with # is of numbers
    const numeric = headers.map((header) => header.startsWith("#"));
    const cell = (value, i) =>
      h(i === 0 ? "th" : "td", { scope: i === 0 ? "row" : null, class: numeric[i] ? "n" : null }, value);
    return h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      h(
        "table",
        null,
        h(
          "thead",
          null,
          h(
            "tr",
            null,
            headers.map((header, i) =>
              h("th", { scope: "col", class: numeric[i] ? "n" : null }, header.replace("#", "")),
            ),
          ),
        ),
        h(
          "tbody",
          null,
          rows.map((row) => h("tr", null, row.map(cell))),
        ),
      ),
    );
  }
  function asTable(parent, headers, rows, caption) {
    parent.append(h("details", null, h("summary", null, "These numbers as a table"), table(headers, rows, caption)));
  }
  function key(parent, entries) {
    parent.append(
      h(
        "ul",
        { class: "key", "aria-hidden": "true" },
        entries.map(([draw, label]) => {
          const sign = s("svg", { width: 22, height: 12 });
          sign.append(...draw());
          return h("li", null, sign, label);
        }),
      ),
    );
  }
  const finding = (parent, message) => parent.append(h("p", { class: "finding" }, message));

  function chooser(label, options, chosen, onChange) {
    const select = h(
      "select",
      null,
      options.map(([value, name]) => h("option", { value }, name)),
    );
    select.value = chosen;
    select.addEventListener("change", () => onChange(select.value));
    return h("p", { class: "choose" }, h("label", null, `${label} `, select));
  }
  function yAxis(svg, scale, values, left, right, format) {
    for (const value of values) {
      svg.append(
        line(left, scale(value), right, scale(value), "grid"),
        text(left - 8, scale(value) + 4, (format || plain)(value), { "text-anchor": "end" }),
      );
    }
  }
  function spreadOut(wanted, gap, low, high) {
    // places of labels that do not touch
    const order = wanted.map((y, i) => i).sort((a, b) => wanted[a] - wanted[b]),
      placed = [...wanted];
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
  const extreme = (values, better) => values.reduce((best, value, i) => (better(value, values[best]) ? i : best), 0);
  const most = (values) => extreme(values, (a, b) => a > b);
  const least = (values) => extreme(values, (a, b) => a < b);

  // ---- Layers ---------------------------------------------------------------------------------------------

  function drawLayers(root) {
    const means = layers.map((layer) => layer.mean),
      top = most(means),
      low = least(means);
    if (layers.length > 1) {
      finding(
        root,
        `Layer ${top} wakes most, ${short(means[top])} of ${grouped(sizes[top])} neurons; layer ${low} fewest, ${short(means[low])}.`,
      );
    }
    key(root, [
      [() => [rect(0, 1, 20, 10, "bar-fill")], "mean"],
      [() => [line(10, 0, 10, 12, "tick")], "median"],
      [() => [line(0, 6, 12, 6, "stem"), circle(15, 6, 4, "ring")], "99th percentile"],
    ]);
    chart(root, (width) => {
      const wide = width > 520,
        left = 30,
        right = wide ? 130 : 54,
        row = layers.length > 20 ? 20 : 26,
        head = 6;
      const high = Math.max(1, ...layers.map((layer) => Math.max(layer.p99, layer.mean)));
      const x = linear(0, high, left, width - right),
        bottom = head + row * layers.length;
      const svg = canvas(
        width,
        bottom + 38,
        `Active neurons of ${layers.length} layers: mean, median and 99th percentile`,
      );
      for (const value of ticks(0, high, wide ? 8 : 4)) {
        svg.append(
          line(x(value), head, x(value), bottom, "grid"),
          text(x(value), bottom + 16, grouped(value), { "text-anchor": "middle" }),
        );
      }
      svg.append(text((left + width - right) / 2, bottom + 34, "active neurons a token", { "text-anchor": "middle" }));
      const marks = layers.map((layer, i) => {
        const y = head + i * row,
          middle = y + row / 2,
          bar = Math.min(14, row - 6);
        return explained(
          s(
            "g",
            { class: "mark" },
            text(left - 8, middle + 4, i, { "text-anchor": "end" }),
            line(x(layer.mean), middle, x(layer.p99), middle, "stem"),
            rect(x(0), middle - bar / 2, x(layer.mean) - x(0), bar, "bar-fill"),
            line(x(layer.p50), middle - bar / 2 - 2, x(layer.p50), middle + bar / 2 + 2, "tick"),
            circle(x(layer.p99), middle, 4.5, "ring"),
            text(width - (wide ? 62 : 0), middle + 4, short(layer.mean), { "text-anchor": "end", class: "value" }),
            wide ? text(width, middle + 4, percent(layer.mean / sizes[i], 1), { "text-anchor": "end" }) : null,
            rect(0, y, width, row, "cover"),
          ),
          `Layer ${i} (${layer.name})\nmean ${short(layer.mean)} of ${grouped(sizes[i])}, ${percent(layer.mean / sizes[i])}\nmedian ${short(layer.p50)}, 90th percentile ${short(layer.p90)}, 99th ${short(layer.p99)}, most ${grouped(layer.max)}\nsilent on this text: ${percent(layer.silent)} of the neurons`,
        );
      });
      svg.append(...marks);
      roving(marks);
      return svg;
    });
    const counted = layers.some((layer) => layer.counted);
    asTable(
      root,
      [
        "layer",
        "name",
        "#neurons",
        "#mean",
        "#median",
        "#p90",
        "#p99",
        "#most",
        "#silent",
        ...(counted ? ["silent before"] : []),
      ],
      layers.map((layer, i) => [
        String(i),
        layer.name,
        grouped(sizes[i]),
        short(layer.mean),
        short(layer.p50),
        short(layer.p90),
        short(layer.p99),
        grouped(layer.max),
        percent(layer.silent),
        ...(counted
          ? [
              layer.counted
                ? `${percent(layer.counted.silent)} in ${grouped(layer.counted.tokens)} tokens (${layer.counted.source})`
                : "–",
            ]
          : []),
      ]),
      "Active neurons by layer",
    );
  }

  // ---- Positions ------------------------------------------------------------------------------------------

  function drawPositions(root) {
    const buckets = analysis.positions,
      last = buckets.length - 1;
    const total = (k) => layers.reduce((sum, layer) => sum + layer.by_position[k], 0);
    const ratio = total(last) ? total(0) / total(last) : 1;
    finding(
      root,
      ratio > 1.1
        ? `The first token of a sequence wakes ${ratio.toFixed(1)} times as many neurons as the last ones.`
        : ratio < 0.9
          ? `The first token of a sequence wakes fewer neurons than the last ones: ${percent(ratio)} as many.`
          : "The position makes little difference.",
    );
    let chosen = null,
      pointed = null,
      shown = null;
    const chips = layers.map((layer, i) => {
      const chip = h(
        "button",
        { type: "button", "aria-pressed": "false", "aria-label": `Layer ${i}`, class: layerShade(i) },
        String(i),
      );
      chip.style.setProperty("--line", "var(--cell)");
      chip.addEventListener("click", () => {
        chosen = chosen === i ? null : i;
        update();
      });
      chip.addEventListener("pointerenter", () => point(i));
      chip.addEventListener("pointerleave", () => point(null));
      chip.addEventListener("focus", () => point(i));
      chip.addEventListener("blur", () => point(null));
      return chip;
    });
    function point(i) {
      pointed = i;
      update();
    }
    function update() {
      const i = pointed ?? chosen;
      chips.forEach((chip, k) => chip.setAttribute("aria-pressed", String(k === chosen)));
      if (shown) shown(i);
    }
    root.append(h("div", { class: "choose", role: "group", "aria-label": "Layers" }, h("span", null, "Layer"), chips));
    chart(root, (width) => {
      const left = 44,
        right = 30,
        top = 16,
        height = width > 520 ? 320 : 270,
        bottom = height - 44;
      const all = layers.flatMap((layer) => layer.by_position),
        high = Math.max(...all) || 1,
        low = Math.min(...all);
      const log = low > 0 && high / low > 8;
      const y = log ? logarithmic(low * 0.85, high * 1.15, bottom, top) : linear(0, high * 1.05, bottom, top);
      const x = (k) => left + ((width - left - right) * k) / Math.max(1, last);
      const svg = canvas(width, height, `Mean active neurons by position, a line for each of ${layers.length} layers`);
      yAxis(svg, y, log ? decades(low * 0.85, high * 1.15, 7) : ticks(0, high * 1.05, 6), left, width - right);
      const stride = Math.ceil(26 / Math.max(1, x(1) - x(0))); // of labels, where room is scarce
      buckets.forEach((bucket, k) =>
        svg.append(
          line(x(k), bottom, x(k), bottom + 4, "axis"),
          text(x(k), bottom + 18, k % stride ? "" : grouped(bucket.first), { "text-anchor": "middle" }),
        ),
      );
      svg.append(
        text((left + width - right) / 2, height - 6, "position in the sequence, from", { "text-anchor": "middle" }),
      );
      svg.append(text(left - 36, top - 6, log ? "active neurons, log scale" : "active neurons"));
      const ends = spreadOut(
        layers.map((layer) => y(layer.by_position[last])),
        13,
        top,
        bottom,
      );
      const group = s("g", null),
        labels = s("g", { "aria-hidden": "true" });
      const series = layers.map((layer, i) => {
        const points = layer.by_position.map((value, k) => [x(k), y(value)]),
          hit = s("path", { d: path(points), class: "hit" });
        hit.addEventListener("pointerenter", () => point(i));
        hit.addEventListener("pointerleave", () => point(null));
        hit.addEventListener("click", () => {
          chosen = chosen === i ? null : i;
          update();
        });
        return s(
          "g",
          { class: `series tinted ${layerShade(i)}`, "data-layer": i },
          s("path", { d: path(points), class: "line" }),
          points.map(([px, py]) => circle(px, py, 2.5, "dot")),
          layers.length <= 20 ? text(width - right + 8, ends[i] + 4, i) : null,
          hit,
        );
      });
      group.append(...series);
      svg.append(group, labels);
      shown = (i) => {
        group.classList.toggle("dimmed", i !== null);
        series.forEach((node, k) => node.classList.toggle("chosen", k === i));
        labels.replaceChildren(
          ...(i === null
            ? []
            : layers[i].by_position.map((value, k) =>
                text(x(k), y(value) - 9, short(value), { "text-anchor": k ? "middle" : "start", class: "on" }),
              )),
        );
      };
      shown(pointed ?? chosen);
      return svg;
    });
    asTable(
      root,
      ["positions", ...layers.map((_, i) => `#layer ${i}`)],
      buckets.map((bucket, k) => [
        bucket.first === bucket.last ? grouped(bucket.first) : `${grouped(bucket.first)} to ${grouped(bucket.last)}`,
        ...layers.map((layer) => short(layer.by_position[k])),
      ]),
      "Mean active neurons by position and layer",
    );
  }

  // ---- The text -------------------------------------------------------------------------------------------

  function drawText(root) {
    const { tokens, active, start, sequence } = analysis.sample,
      count = tokens.length;
    const totals = tokens.map((_, t) => active.reduce((sum, row) => sum + row[t], 0));
    let by = "all",
      chosen = most(totals);
    const legend = h("div", { class: "ramp" });
    const passage = h("p", {
      class: "passage",
      role: "group",
      "aria-label": "Sample text, coloured by active neurons",
    });
    const spans = tokens.map((token, t) => {
      const shown = visible(token),
        unseen = /^\s*$/u.test(token);
      const span = h("span", { "data-token": t, role: "img" }, unseen ? shown : unhidden(token));
      span.classList.toggle("unseen", unseen);
      span.setAttribute("aria-label", `${shown}: ${grouped(totals[t])} neurons`);
      span.addEventListener("pointerenter", () => choose(t));
      span.addEventListener("pointerdown", () => choose(t));
      span.addEventListener("focus", () => choose(t));
      return span;
    });
    spans.forEach((span, t) => {
      passage.append(span);
      if (tokens[t].includes("\n") && !/^\s*\n/u.test(tokens[t + 1] || "")) passage.append("\n"); // blank lines would only take room
    });
    roving(spans);

    const name = h("p", { class: "token" }),
      sum = h("p", { class: "sum" }),
      bars = h("div", { class: "bars" });
    const detail = h("div", { class: "detail", "data-detail": "", "aria-live": "polite" }, name, sum, bars);
    const highest = Math.max(1, ...active.flat());

    function drawBars(width) {
      const row = layers.length > 16 ? 13 : 18,
        left = 26,
        right = 38;
      const x = linear(0, Math.max(1, ...active.map((counts) => counts[chosen])), left, width - right);
      const svg = canvas(width, row * layers.length + 2, "Active neurons of this token by layer");
      active.forEach((counts, i) => {
        const y = i * row,
          value = counts[chosen];
        svg.append(
          s(
            "g",
            { "data-layer": i, "data-count": value, role: "img", "aria-label": `layer ${i}: ${value}` },
            text(left - 8, y + row / 2 + 4, i, { "text-anchor": "end" }),
            rect(x(0), y + 3, Math.max(value ? 1 : 0, x(value) - x(0)), row - 6, "bar-fill"),
            text(x(value) + 6, y + row / 2 + 4, grouped(value), { class: "value" }),
          ),
        );
      });
      return svg;
    }

    const scaled = (value, high) => Math.sqrt(value / (high || 1)) * 0.999;
    let columns = null,
      scroller = null;

    function choose(t) {
      spans[chosen].classList.remove("chosen");
      chosen = t;
      spans[t].classList.add("chosen");
      detail.setAttribute("data-token", t);
      name.replaceChildren(tokenNode(tokens[t]));
      const rank = 1 + totals.filter((other) => other > totals[t]).length;
      sum.textContent = `wakes ${grouped(totals[t])} neurons in all: ${rank === 1 ? "the most" : `number ${grouped(rank)}`} of ${grouped(count)} tokens shown. Position ${grouped(start + t)}.`;
      small.redraw();
      if (columns) columns(t);
    }
    function colour() {
      const values = by === "all" ? totals : active[Number(by)],
        low = Math.min(...values);
      const high = Math.max(low + 1, [...values].sort((a, b) => a - b)[Math.floor(0.98 * (count - 1))]); // an outlier must not pale the rest
      spans.forEach((span, t) => {
        span.classList.remove(...[...span.classList].filter((name_) => /^r\d+$/.test(name_)));
        span.classList.add(shade((0.999 * (values[t] - low)) / (high - low)));
      });
      drawRamp(
        legend,
        (t) => low + (high - low) * t,
        `${by === "all" ? "neurons of all layers" : `neurons of layer ${by}`}${Math.max(...values) > high ? "; a few have more" : ""}`,
      );
    }

    root.append(
      chooser(
        "Colour by",
        [["all", "all layers"], ...layers.map((_, i) => [String(i), `layer ${i}`])],
        "all",
        (value) => {
          by = value;
          colour();
        },
      ),
      legend,
    );
    root.append(h("div", { class: "reading" }, passage, detail));
    const small = chart(bars, drawBars);

    const below = h("div", { class: "matrix" });
    root.append(below);
    below.append(h("h3", null, "Layer by token"));
    const scale = h("div", { class: "ramp" });
    drawRamp(scale, (t) => highest * t * t, "neurons of a layer, colours by the square root");
    below.append(scale);
    scroller = h("div", {
      class: "scroll",
      tabindex: 0,
      role: "region",
      "aria-label": "Matrix of layers and tokens; scrolls sideways",
    });
    below.append(scroller);
    chart(scroller, (width) => {
      const left = 26,
        row = layers.length > 20 ? 10 : 16,
        cell = Math.max(width > 700 ? 3.8 : 6, (width - left - 2) / count);
      const high = row * layers.length,
        total = Math.ceil(left + cell * count + 2);
      const svg = canvas(total, high + 22, `Active neurons of ${layers.length} layers for ${count} tokens`);
      svg.style.maxWidth = "none";
      svg.setAttribute("role", "img");
      layers.forEach((_, i) =>
        svg.append(
          text(left - 8, i * row + row / 2 + 4, layers.length > 20 && i % 5 ? "" : i, { "text-anchor": "end" }),
        ),
      );
      const cells = s("g", { "shape-rendering": "crispEdges" });
      active.forEach((counts, i) =>
        counts.forEach((value, t) =>
          cells.append(rect(left + t * cell, i * row, cell + 0.3, row - 1, `cell ${shade(scaled(value, highest))}`)),
        ),
      );
      for (const t of ticks(0, count - 1, Math.min(12, total / 70)))
        svg.append(text(left + (t + 0.5) * cell, high + 16, grouped(start + t), { "text-anchor": "middle" }));
      const frame = s("rect", {
        y: -1,
        width: cell,
        height: high + 1,
        fill: "none",
        stroke: "var(--ink)",
        "stroke-width": 2,
        "data-column": chosen,
      });
      const cover = rect(left, 0, cell * count, high, "cover");
      cover.setAttribute("fill", "transparent");
      const at = (event) => {
        const box = cover.getBoundingClientRect();
        return [
          Math.floor(((event.clientX - box.left) / box.width) * count),
          Math.floor(((event.clientY - box.top) / box.height) * layers.length),
        ];
      };
      const follow = (event) => {
        const [t, i] = at(event);
        if (!(t in tokens) || !(i in layers)) return;
        if (t !== chosen) choose(t);
        showTip(`${visible(tokens[t])}\nlayer ${i}: ${grouped(active[i][t])} neurons`, event.clientX, event.clientY);
      };
      cover.addEventListener("pointermove", follow);
      cover.addEventListener("pointerdown", follow);
      cover.addEventListener("pointerleave", hideTip);
      svg.append(cells, frame, cover);
      columns = (t) => {
        frame.setAttribute("x", left + t * cell);
        frame.setAttribute("data-column", t);
        const x = left + t * cell;
        if (
          !scroller.matches(":hover") &&
          (x < scroller.scrollLeft || x + cell > scroller.scrollLeft + scroller.clientWidth)
        )
          scroller.scrollLeft = x - scroller.clientWidth / 2;
      };
      columns(chosen);
      return svg;
    });
    colour();
    choose(chosen);
    scroller.scrollLeft = 0;
    const from = `Tokens ${grouped(start)} to ${grouped(start + count - 1)} of sequence ${grouped(sequence)}.`;
    root.append(h("p", { class: "note" }, from));
    asTable(
      root,
      ["token", "#position", "#all layers", ...layers.map((_, i) => `#${i}`)],
      tokens.map((token, t) => [
        tokenNode(token),
        grouped(start + t),
        grouped(totals[t]),
        ...active.map((counts) => grouped(counts[t])),
      ]),
      "Active neurons of each token by layer",
    );
  }

  function drawRamp(holder, count, what) {
    // count: of a place between 0 and 1
    const width = 14,
      svg = s("svg", { width: STEPS * width, height: 26, "aria-hidden": "true" });
    for (let k = 0; k < STEPS; k++) svg.append(rect(k * width, 0, width, 10, `cell r${k}`));
    [0, 0.5, 1].forEach((t) =>
      svg.append(
        text(t * STEPS * width, 24, grouped(count(t)), {
          "text-anchor": t === 0 ? "start" : t === 1 ? "end" : "middle",
        }),
      ),
    );
    holder.replaceChildren(svg, h("span", null, what));
  }

  // ---- Tokens ---------------------------------------------------------------------------------------------

  function drawTokens(root) {
    document.querySelector('[data-lead="tokens"]').textContent =
      `Means over all occurrences, of all layers together, for tokens that occur at least ${analysis.min_count} times. The mean of all tokens is ${short(layers.reduce((sum, layer) => sum + layer.mean, 0))}.`;
    if (!analysis.most_active.length) {
      root.append(
        h(
          "p",
          { class: "missing" },
          `No token occurs ${analysis.min_count} times in this text: a longer one ranks them.`,
        ),
      );
      return;
    }
    const context = (example) => {
      const letters = Array.from(example.text),
        part = (from, to) => unhidden(letters.slice(from, to).join("")); // characters, as Python counts
      return h(
        "p",
        { class: "context" },
        part(0, example.start),
        h("mark", null, part(example.start, example.end) || "∅"),
        part(example.end),
      );
    };
    const ranking = (types, caption) => {
      const body = h(
        "tbody",
        { class: types.length > 10 ? "hidden-rows" : null },
        types.map((type) =>
          h(
            "tr",
            { "data-id": type.id },
            h("th", { scope: "row" }, tokenNode(type.text)),
            h("td", { class: "n" }, short(type.mean)),
            h("td", { class: "n" }, grouped(type.count)),
            h(
              "td",
              null,
              type.examples.slice(0, 1).map(context),
              type.examples.length > 1
                ? h(
                    "details",
                    null,
                    h("summary", null, `${type.examples.length - 1} more`),
                    type.examples.slice(1).map(context),
                  )
                : null,
            ),
          ),
        ),
      );
      const holder = h(
        "div",
        null,
        h(
          "table",
          null,
          h("caption", null, caption),
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              h("th", { scope: "col" }, "token"),
              h("th", { scope: "col", class: "n" }, "neurons"),
              h("th", { scope: "col", class: "n" }, "times"),
              h("th", { scope: "col" }, "in context"),
            ),
          ),
          body,
        ),
      );
      if (types.length > 10) {
        const more = h("button", { type: "button" }, `Show all ${types.length}`);
        more.addEventListener("click", () => {
          body.classList.remove("hidden-rows");
          more.remove();
        });
        holder.append(h("p", null, more));
      }
      return holder;
    };
    root.append(
      h(
        "div",
        { class: "pair" },
        ranking(analysis.most_active, "Most neurons"),
        ranking(analysis.least_active, "Fewest neurons"),
      ),
    );
  }

  // ---- Neurons --------------------------------------------------------------------------------------------

  function drawFrequencies(root) {
    let chosen = 0;
    const said = h("p", { class: "finding", "aria-live": "polite" }),
      shares = h("ul", { class: "shares" });
    root.append(
      chooser(
        "Layer",
        layers.map((layer, i) => [String(i), `${i} (${layer.name})`]),
        "0",
        (value) => {
          chosen = Number(value);
          update();
        },
      ),
      said,
    );
    const positive = layers.flatMap((layer) => layer.curve.frequencies.filter((f) => f > 0));
    const low = Math.min(1, ...positive),
      largest = Math.max(...sizes);
    const plot = chart(root, (width) => {
      const left = 58,
        right = 12,
        top = 28,
        height = width > 520 ? 340 : 280,
        bottom = height - 42;
      const x = logarithmic(1, Math.max(2, largest), left, width - right),
        y = logarithmic(low * 0.8, 1, bottom, top);
      const layer = layers[chosen],
        plan = layer.plan;
      const svg = canvas(
        width,
        height,
        `Share of tokens for which neurons of layer ${chosen} fire, from the busiest neuron to the rarest`,
      );
      svg.setAttribute("data-layer", chosen);
      yAxis(svg, y, decades(low * 0.8, 1, 7), left, width - right, (value) => `${plain(100 * value)} %`);
      for (const value of decades(1, largest, width > 520 ? 12 : 6))
        svg.append(
          line(x(value), bottom, x(value), bottom + 4, "axis"),
          text(x(value), bottom + 18, grouped(value), { "text-anchor": "middle" }),
        );
      svg.append(
        text((left + width - right) / 2, height - 6, "neurons, the busiest first", { "text-anchor": "middle" }),
        text(0, top - 16, "share of tokens for which it fires"),
      );
      const shape = (curve) =>
        path(curve.ranks.map((rank, k) => [x(rank + 1), curve.frequencies[k] > 0 ? y(curve.frequencies[k]) : null]));
      if (!plan.dense && plan.hot > 0) {
        svg.append(
          rect(left, top, x(plan.hot) - left, bottom - top, "area"),
          line(x(plan.hot), top, x(plan.hot), bottom, "axis"),
          text(x(plan.hot) - 8, bottom - 10, `${grouped(plan.hot)} hot`, { "text-anchor": "end", class: "value" }),
        );
      }
      layers.forEach((other, i) => {
        if (i !== chosen) svg.append(s("path", { d: shape(other.curve), class: "line ghost" }));
      });
      svg.append(s("path", { d: shape(layer.curve), class: "line", "data-curve": chosen }));
      const points = layer.curve.ranks.map((rank, k) => [rank, layer.curve.frequencies[k]]).filter(([, f]) => f > 0);
      const stride = Math.max(1, Math.ceil(points.length / 40));
      const marks = points
        .filter((_, k) => k % stride === 0 || k === points.length - 1)
        .map(([rank, f]) =>
          explained(
            s("g", { class: "mark" }, s("circle", { cx: x(rank + 1), cy: y(f), r: 9, class: "cover" })),
            `neuron ${grouped(rank + 1)} of ${grouped(sizes[chosen])}, by how busy it is\nfires for ${percent(f, f < 0.01 ? 3 : 1)} of the tokens`,
          ),
        );
      svg.append(...marks);
      roving(marks);
      return svg;
    });
    function update() {
      const layer = layers[chosen],
        plan = layer.plan;
      const half = layer.top_shares["10"],
        hot = plan.dense
          ? "The plan runs this layer densely: no hot set."
          : plan.hot
            ? `Hot: ${grouped(plan.hot)} of ${grouped(sizes[chosen])} neurons.`
            : "No neuron is hot: all are computed only where they fire.";
      said.textContent = `In layer ${chosen} the busiest tenth of the neurons carries ${percent(half)} of all firings; ${layer.silent ? `${percent(layer.silent)} never fire` : "every neuron fires at least once"}. ${hot}`;
      shares.replaceChildren(
        ...Object.entries(layer.top_shares).map(([p, share]) =>
          h("li", null, h("b", null, percent(share)), `of firings by the busiest ${p} %`),
        ),
      );
      plot.redraw();
    }
    root.append(shares);
    update();
    asTable(
      root,
      ["layer", ...Object.keys(layers[0].top_shares).map((p) => `#busiest ${p} %`), "#silent", "#hot"],
      layers.map((layer, i) => [
        String(i),
        ...Object.values(layer.top_shares).map((share) => percent(share)),
        percent(layer.silent),
        layer.plan.dense ? "dense" : grouped(layer.plan.hot),
      ]),
      "Shares of all firings that the busiest neurons carry",
    );
  }

  // ---- Overlap --------------------------------------------------------------------------------------------

  function drawOverlap(root) {
    const pairs = layers.map((layer) => layer.overlap),
      both = pairs.filter((pair) => pair.neighbours && pair.random);
    if (both.length) {
      const mean = both.reduce((sum, pair) => sum + pair.neighbours / pair.random, 0) / both.length;
      finding(
        root,
        mean > 1.05
          ? `Neighbours share ${mean.toFixed(1)} times as much as random pairs, in the mean of the layers.`
          : "Neighbours share hardly more than random pairs.",
      );
    }
    key(root, [
      [() => [circle(11, 6, 4.5, "ring")], "random pairs"],
      [() => [circle(11, 6, 5, "dot")], "neighbours"],
    ]);
    chart(root, (width) => {
      const left = 30,
        right = 30,
        row = layers.length > 20 ? 18 : 24,
        head = 6,
        bottom = head + row * layers.length;
      const high = Math.max(0.01, ...pairs.flatMap((pair) => [pair.neighbours || 0, pair.random || 0])) * 1.05;
      const x = linear(0, high, left, width - right);
      const svg = canvas(width, bottom + 38, `Overlap of active neurons by layer: neighbours against random pairs`);
      for (const value of ticks(0, high, width > 520 ? 8 : 4))
        svg.append(
          line(x(value), head, x(value), bottom, "grid"),
          text(x(value), bottom + 16, percent(value, high < 0.05 ? 1 : 0), { "text-anchor": "middle" }),
        );
      svg.append(text((left + width - right) / 2, bottom + 34, "shared neurons", { "text-anchor": "middle" }));
      const marks = pairs.map((pair, i) => {
        const middle = head + i * row + row / 2,
          ends = [pair.random, pair.neighbours];
        return explained(
          s(
            "g",
            { class: "mark" },
            text(left - 8, middle + 4, i, { "text-anchor": "end" }),
            ends.every(known) ? line(x(ends[0]), middle, x(ends[1]), middle, "stem") : null,
            known(ends[0]) ? circle(x(ends[0]), middle, 4.5, "ring") : null,
            known(ends[1]) ? circle(x(ends[1]), middle, 5, "dot") : null,
            rect(0, middle - row / 2, width, row, "cover"),
          ),
          `Layer ${i}\nneighbours share ${known(ends[1]) ? percent(ends[1], 1) : "nothing that could be counted"}\nrandom pairs share ${known(ends[0]) ? percent(ends[0], 1) : "nothing that could be counted"}`,
        );
      });
      svg.append(...marks);
      roving(marks);
      return svg;
    });
    asTable(
      root,
      ["layer", "#neighbours", "#random pairs"],
      pairs.map((pair, i) => [
        String(i),
        known(pair.neighbours) ? percent(pair.neighbours, 1) : "–",
        known(pair.random) ? percent(pair.random, 1) : "–",
      ]),
      "Overlap by layer",
    );
  }

  // ---- Plan -----------------------------------------------------------------------------------------------

  function drawPlan(root) {
    const measured = data.layer_speedups;
    root.append(
      table(
        ["layer", "#active", "#hot", "#cap", "#batch from", "#predicted", ...(measured ? ["#measured"] : [])],
        layers.map((layer, i) => [
          String(i),
          short(layer.mean),
          ...(layer.plan.dense
            ? ["dense", "–", "–"]
            : [grouped(layer.plan.hot), grouped(layer.plan.cap), grouped(layer.plan.min_tokens)]),
          times(layer.plan.predicted),
          ...(measured ? [times(measured[i])] : []),
        ]),
        "Plan by layer",
      ),
    );
    if (!measured)
      root.append(
        h(
          "p",
          { class: "missing", "data-missing": "layer-times" },
          data.no_layer_times[0],
          " ",
          h("code", null, data.no_layer_times[1]),
        ),
      );
    else root.append(h("p", { class: "note" }, `Predicted for a GPU; measured on ${data.layer_machine}.`));
    if (measured && known(data.correlation)) {
      root.append(
        h(
          "p",
          { class: "note" },
          `Correlation between active neurons and measured speedup, over the layers: ${data.correlation.toFixed(2).replace("-", "−")} (Pearson). ${data.correlation < -0.5 ? "The fewer fire, the faster." : "Other things than the number of active neurons decide here."}`,
        ),
      );
    } else if (measured)
      root.append(
        h(
          "p",
          { class: "note" },
          "The layers are too few or too alike for a correlation between active neurons and measured speedup.",
        ),
      );
  }

  // ---- Training -------------------------------------------------------------------------------------------

  function drawTraining(root) {
    const run = data.training,
      { steps } = run,
      first = (values) => values.find(known),
      end = (values) => [...values].reverse().find(known);
    const parts = run.loss.some(known) ? [{ values: run.loss, title: "cross-entropy", tall: 150 }] : [];
    if (run.active.some(known))
      parts.push({
        values: run.active,
        title: "active neurons a token and layer",
        tall: 150,
        ghosts: run.layers,
        log: true,
      });
    if (run.dead.some(known))
      parts.push({ values: run.dead, title: "dead neurons", tall: 80, format: (value) => percent(value) });
    root.append(h("p", { class: "lead" }, "What the run logged while it trained; thin lines are single layers."));
    if (!parts.length) return void root.append(h("p", { class: "missing" }, "The log holds no finite number."));
    if (run.loss.some(known))
      finding(
        root,
        `Cross-entropy went from ${short(first(run.loss))} to ${short(end(run.loss))}` +
          (run.active.some(known)
            ? `, active neurons from ${short(first(run.active))} to ${short(end(run.active))}.`
            : "."),
      );
    if (!run.active.some(known)) root.append(h("p", { class: "note" }, "The run logged no active neurons."));
    chart(root, (width) => {
      const left = 50,
        right = 52,
        x = linear(steps[0], steps[steps.length - 1], left, width - right);
      const gap = 34,
        height = parts.reduce((sum, part) => sum + part.tall + gap, 0) + 30;
      const svg = canvas(
        width,
        height,
        `Training over ${steps.length} logged steps: ${parts.map((part) => part.title).join(", ")}`,
      );
      let top = gap - 8;
      const dots = steps.map(() => []);
      for (const part of parts) {
        const bottom = top + part.tall,
          own = [
            ...part.values,
            ...(part.values === run.loss ? run.validation : []),
            ...(part.ghosts || []).flat(),
          ].filter(known);
        const high = own.reduce((a, b) => Math.max(a, b), -Infinity),
          low = own.reduce((a, b) => Math.min(a, b), Infinity),
          log = part.log && low > 0 && high / low > 8;
        const loss = part.values === run.loss,
          pad = (high - low) * 0.06 || 0.5;
        const y = log
          ? logarithmic(low * 0.9, high * 1.1, bottom, top)
          : loss
            ? linear(low - pad, high + pad, bottom, top)
            : linear(0, high * 1.08 || 1, bottom, top);
        yAxis(
          svg,
          y,
          log
            ? decades(low * 0.9, high * 1.1, 5)
            : loss
              ? ticks(low - pad, high + pad, 4)
              : ticks(0, high * 1.08 || 1, part.tall > 100 ? 4 : 2),
          left,
          width - right,
          part.format,
        );
        svg.append(text(left - 42, top - 10, part.title + (log ? ", log scale" : ""), { class: "value" }));
        const at = (values) => steps.map((step, k) => [x(step), known(values[k]) ? y(values[k]) : null]);
        for (const ghost of part.ghosts || []) svg.append(s("path", { d: path(at(ghost)), class: "line ghost" }));
        if (part.ghosts) {
          const final = part.ghosts.map((values) => end(values) ?? 0),
            few = part.ghosts.length <= 6;
          const named = few ? final.map((_, i) => i) : [...new Set([most(final), least(final)])];
          const ends = spreadOut(
            named.map((i) => (final[i] ? y(final[i]) : bottom)),
            13,
            top,
            bottom + 8,
          );
          named.forEach((i, k) => svg.append(text(width - right + 8, ends[k] + 4, `layer ${i}`)));
        }
        svg.append(s("path", { d: path(at(part.values)), class: "line" }));
        if (loss && run.validation.some(known)) {
          run.validation_steps.forEach(
            (step, k) =>
              known(run.validation[k]) &&
              step <= steps[steps.length - 1] &&
              step >= steps[0] &&
              svg.append(circle(x(step), y(run.validation[k]), 4, "warm")),
          );
          svg.append(circle(width - right - 78, top - 14, 4, "warm"), text(width - right - 70, top - 10, "validation"));
        }
        part.values.forEach((value, k) => {
          if (known(value)) dots[k].push([x(steps[k]), y(value)]);
        });
        top = bottom + gap;
      }
      const axis = top - gap;
      for (const value of ticks(steps[0], steps[steps.length - 1], width > 520 ? 8 : 4))
        svg.append(
          line(x(value), axis, x(value), axis + 4, "axis"),
          text(x(value), axis + 18, grouped(value), { "text-anchor": "middle" }),
        );
      svg.append(text((left + width - right) / 2, axis + 36, "step", { "text-anchor": "middle" }));
      const cursor = s("g", { "aria-hidden": "true" }),
        step = (width - left - right) / Math.max(1, steps.length - 1);
      const evaluated = new Map(run.validation_steps.map((at, k) => [at, run.validation[k]]));
      const marks = steps.map((at, k) => {
        const validation = evaluated.get(at),
          mark = explained(
            s(
              "g",
              { class: "mark" },
              s("rect", { x: x(at) - step / 2, y: 0, width: Math.max(2, step), height: axis, fill: "transparent" }),
            ),
            `step ${grouped(at)}\n` +
              parts
                .map(
                  (part) =>
                    `${part.title} ${known(part.values[k]) ? (part.format || short)(part.values[k]) : "not logged"}`,
                )
                .join("\n") +
              (known(validation) ? `\nvalidation ${short(validation)}` : ""),
          );
        const show = () =>
          cursor.replaceChildren(
            line(x(at), 10, x(at), axis, "cursor"),
            ...dots[k].map(([px, py]) => circle(px, py, 4, "dot")),
          );
        mark.addEventListener("pointerenter", show);
        mark.addEventListener("focus", show);
        for (const leave of ["pointerleave", "blur"]) mark.addEventListener(leave, () => cursor.replaceChildren());
        return mark;
      });
      svg.append(cursor, ...marks);
      roving(marks);
      return svg;
    });
    asTable(
      root,
      ["step", ...parts.map((part) => `#${part.title}`)],
      steps.map((step, k) => [
        grouped(step),
        ...parts.map((part) => (known(part.values[k]) ? (part.format || short)(part.values[k]) : "–")),
      ]),
      "The training log",
    );
  }

  // ---- Speed ----------------------------------------------------------------------------------------------

  const megabytes = (bytes) => (known(bytes) ? `${short(bytes / 1e6)} MB` : "not available");

  function drawSpeed(root) {
    const { cases } = data,
      machines = [...new Set(cases.map((one) => one.machine))];
    root.append(
      h(
        "p",
        { class: "lead" },
        `Time for the same work, as a share of dense; shorter is faster. The line at the end of a bar spans the 20th to the 80th percentile. ${machines.length === 1 ? `${machines[0]}.` : ""}`,
      ),
    );
    const groups = [
      [cases.filter((one) => one.whole_model), "Whole model"],
      [cases.filter((one) => !one.whole_model), "One FFN"],
    ].filter(([some]) => some.length);
    for (const [some, title] of groups) {
      if (groups.length > 1) root.append(h("h3", null, title));
      const first = some.slice(0, data.cases_drawn);
      chart(root, (width) => bars(first, width, machines.length > 1));
      if (some.length > first.length)
        root.append(
          h("p", { class: "note" }, `The first ${first.length} of ${some.length} measurements; all are in the table.`),
        );
    }
    const rows = cases.flatMap((one) =>
      one.sides.map((side, k) => [
        k ? "" : one.label,
        ...(machines.length > 1 ? [k ? "" : one.machine] : []),
        side.name,
        short(side.ms[1]),
        short(side.tokens_per_ms),
        known(side.first_token_ms) ? short(side.first_token_ms) : "–",
        megabytes(side.pass_bytes),
        megabytes(side.copied_bytes),
        known(side.joules_per_token) ? short(1000 * side.joules_per_token) : "not available",
        side.name === "sparse" ? times(one.speedup) : "",
      ]),
    );
    const full = table(
      [
        "measurement",
        ...(machines.length > 1 ? ["machine"] : []),
        "way",
        "#ms",
        "#tokens/ms",
        "#first token, ms",
        "#memory of a pass",
        "#copied weights",
        "#mJ a token",
        "#speedup",
      ],
      rows,
      "Measured times, memory and energy",
    );
    if (rows.length <= 8) root.append(full);
    else root.append(h("details", null, h("summary", null, "All measurements: tokens/ms, memory, energy"), full));
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
  function bars(cases, width, wantsMachine) {
    const wide = width > 620,
      left = wide ? 74 : 68,
      right = wide ? 220 : 92,
      bar = 15,
      step = 20;
    const high = Math.max(1, ...cases.flatMap((one) => one.sides.map((side) => side.ms[2] / one.sides[0].ms[1])));
    const x = linear(0, high, left, width - right),
      parts = [],
      marks = [];
    let y = 0;
    for (const one of cases) {
      const base = one.sides[0].ms[1];
      const rows = wrapped(wantsMachine ? `${one.label}, ${one.machine}` : one.label, (width - 60) / 7.4);
      rows.forEach((row, k) => parts.push(text(0, y + 14 + 16 * k, row, { class: "on" })));
      y += 16 * (rows.length - 1);
      parts.push(text(width, y + 14, times(one.speedup), { class: "on", "text-anchor": "end" }));
      y += 22;
      for (const side of one.sides) {
        const [low, middle, top] = side.ms.map((ms) => x(ms / base)),
          centre = y + bar / 2;
        const mark = explained(
          s(
            "g",
            { class: "mark", "data-side": side.name },
            text(left - 8, centre + 4, side.name, { "text-anchor": "end" }),
            rect(left, y, middle - left, bar, side.name === "sparse" ? "bar-fill" : "bar-soft"),
            line(low, centre, top, centre, "whisker"),
            line(low, centre - 3, low, centre + 3, "whisker"),
            line(top, centre - 3, top, centre + 3, "whisker"),
            text(
              width,
              centre + 4,
              wide ? `${short(side.ms[1])} ms · ${short(side.tokens_per_ms)} tokens/ms` : `${short(side.ms[1])} ms`,
              { "text-anchor": "end", class: "value" },
            ),
            rect(0, y - 2, width, step, "cover"),
          ),
          `${one.label}, ${side.name}\n${short(side.ms[1])} ms (${short(side.ms[0])} to ${short(side.ms[2])})\n${short(side.tokens_per_ms)} tokens/ms`,
        );
        marks.push(mark);
        y += step;
      }
      y += 18;
    }
    const svg = canvas(width, y, "Times of dense and sparse computation");
    svg.append(...parts, ...marks);
    roving(marks);
    return svg;
  }

  function drawBreakEven(root) {
    const found = data.break_even,
      families = Object.entries(found.families),
      all = families.flatMap(([, points]) => points);
    root.append(h("p", { class: "lead" }, `Speedup of one FFN against its mean active neurons. ${found.shape}.`));
    if (known(found.at))
      finding(
        root,
        `With neurons that all fire alike, sparse stops paying at ${grouped(found.at)} active a token (${found.measured ? "measured" : "predicted"}).`,
      );
    const classes = { "uniform workloads": "dot", "skewed workloads": "warm" };
    const drawn = (label, cx, cy) =>
      classes[label] ? circle(cx, cy, 4.5, classes[label]) : circle(cx, cy, 4.5, "ring");
    key(root, [
      ...families.map(([label]) => [() => [drawn(label, 11, 6)], label]),
      ...(found.predicted.length
        ? [[() => [s("path", { d: "M0 6L22 6", class: "line dashed" })], "uniform, predicted"]]
        : []),
      ...(found.same_shape ? [[() => [line(11, 2, 11, 12, "tick")], "this model's layers"]] : []),
    ]);
    chart(root, (width) => {
      const left = 44,
        right = 24,
        top = 16,
        height = width > 520 ? 330 : 280,
        bottom = height - 44;
      const own = found.same_shape ? layers.map((layer) => layer.mean).filter((mean) => mean > 0) : [];
      const across = [...all, ...found.predicted]
          .map((point) => point[0])
          .concat(own, known(found.at) ? [found.at] : []),
        up = [...all, ...found.predicted].map((point) => point[1]);
      const low = Math.min(...across) * 0.85,
        high = Math.max(...across) * 1.15,
        y = linear(Math.min(0.7, ...up), Math.max(1.2, ...up) * 1.05, bottom, top);
      const x = logarithmic(low, high, left, width - right),
        svg = canvas(width, height, "Speedup of one FFN against mean active neurons");
      yAxis(
        svg,
        y,
        ticks(Math.min(0.7, ...up), Math.max(1.2, ...up) * 1.05, 6),
        left,
        width - right,
        (value) => `${Number(value.toFixed(2))}x`,
      );
      for (const value of decades(low, high, width > 520 ? 10 : 5))
        svg.append(
          line(x(value), bottom, x(value), bottom + 4, "axis"),
          text(x(value), bottom + 18, plain(value), { "text-anchor": "middle" }),
        );
      svg.append(
        text((left + width - right) / 2, height - 6, "mean active neurons a token, log scale", {
          "text-anchor": "middle",
        }),
        line(left, y(1), width - right, y(1), "one"),
        text(width - right, y(1) + 16, "dense", { "text-anchor": "end" }),
      );
      if (known(found.at)) svg.append(line(x(found.at), top, x(found.at), bottom, "one"));
      if (found.predicted.length)
        svg.append(s("path", { d: path(found.predicted.map(([a, b]) => [x(a), y(b)])), class: "line dashed" }));
      const marks = families.flatMap(([label, points]) => {
        if (classes[label])
          svg.append(
            s("path", {
              d: path(points.map(([a, b]) => [x(a), y(b)])),
              class: `line ${classes[label] === "warm" ? "warm" : ""}`,
            }),
          );
        return points.map(([a, b]) =>
          explained(
            s(
              "g",
              { class: "mark" },
              drawn(label, x(a), y(b)),
              s("circle", { cx: x(a), cy: y(b), r: 10, class: "cover" }),
            ),
            `${label}\n${short(a)} active: ${times(b)}`,
          ),
        );
      });
      own.forEach((mean) => svg.append(line(x(mean), bottom - 9, x(mean), bottom, "tick")));
      svg.append(...marks);
      roving(marks);
      return svg;
    });
    asTable(
      root,
      ["workload", "#mean active", "#speedup"],
      families.flatMap(([label, points]) => points.map(([a, b]) => [label, short(a), times(b)])),
      "Speedup against mean active neurons",
    );
  }

  // ---- Theme ----------------------------------------------------------------------------------------------

  const page = document.documentElement,
    button = document.getElementById("theme"),
    system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (page.dataset.theme ? page.dataset.theme === "dark" : system.matches);
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
  };
  try {
    if (["light", "dark"].includes(localStorage.getItem("twell-theme")))
      page.dataset.theme = localStorage.getItem("twell-theme");
  } catch {
    /* not kept here */
  }
  button.addEventListener("click", () => {
    page.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("twell-theme", page.dataset.theme);
    } catch {
      /* not kept here */
    }
    name();
  });
  system.addEventListener("change", name);
  name();

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
    const root = place(figure);
    if (root) draw(root);
  }
})();
