// One step of a model on a GPU, on the roofline. `parts.js` stands before this text; anywidget calls `render`, and so
// does the static page (static.py). Names and numbers come from model.get("data"), words from model.get("strings").

const CHOSEN = ["model", "gpu", "phase", "rates", "requests", "context", "new"];
const MARKS = { linear: "M-6 0a6 6 0 1 0 12 0a6 6 0 1 0-12 0", attention: "M0-8 8 0 0 8-8 0Z" }; // a disc, a diamond

const rated = (gpu, rates) => (rates === "peak" ? { ...gpu, mfu: 1, mbu: 1 } : gpu);

// {linear, head, attention: {flops, bytes, seconds, bound}}: the same arithmetic as roofline.parts in Python.
export function measure(data, setting) {
  const shape = data.models[setting.model];
  const gpu = rated(data.gpus[setting.gpu], setting.rates);
  const decode = setting.phase === "decode";
  const tokens = decode ? setting.requests : setting.new;
  const rows = decode ? setting.requests : 1; // tokens that are sampled
  const stop = setting.context + (decode ? 1 : setting.new);
  const pairs = decode ? tokens * stop : ((setting.context + 1 + stop) * tokens) / 2;
  const tiled = Math.ceil(tokens / gpu.tile) * gpu.tile; // a started tile costs as much as a full one
  const part = (flops, bytes, computed) => {
    const arithmetic = computed / (gpu.flops * gpu.mfu);
    const traffic = bytes / (gpu.bandwidth * gpu.mbu);
    return { flops, bytes, seconds: Math.max(arithmetic, traffic), bound: arithmetic > traffic ? "compute" : "memory" };
  };
  const { linear, head, kv, pair, bytes } = shape;
  return {
    linear: part(2 * linear * tokens, linear * bytes, 2 * linear * tiled),
    head: part(2 * head * rows, head * bytes, 2 * head * rows),
    attention: part(pair * pairs, kv * stop * (decode ? tokens : 1), decode ? 0 : pair * pairs), // decodes wait for the cache
  };
}

// What the step needs in memory, and how many GPUs have that much.
export function memory(data, setting) {
  const shape = data.models[setting.model];
  const decode = setting.phase === "decode";
  const weights = (shape.linear + 2 * shape.head) * shape.bytes;
  const kv = shape.kv * (decode ? setting.requests * (setting.context + 1) : setting.context + setting.new);
  const room = data.utilisation * data.gpus[setting.gpu].memory;
  return { weights, kv, room, count: Math.ceil((weights + kv) / room) };
}

function render({ model, el }) {
  const t = translator(model.get("strings"));
  const language = t("lang");
  const { number, percent } = formats(language);
  const compact = new Intl.NumberFormat(language, { notation: "compact" });
  const data = model.get("data");
  const short = (value) => number(value, value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2); // three digits or more
  const setting = () => Object.fromEntries(CHOSEN.map((name) => [name, model.get(name)]));
  const live = liveRegion(400); // not every stop that a slider passes

  function set(name, value) {
    put(model, { [name]: value });
    live.say(spoken());
  }

  // ---- Controls

  const { mfu, mbu } = Object.values(data.gpus)[0];
  const controls = {};
  for (const name of ["model", "gpu"])
    controls[name] = select({ name, label: t(name), options: data.order[name].map((one) => [one, one]),
      change: (value) => set(name, value) });
  const some = { phase: ["decode", "prefill"], rates: ["peak", "reached"] };
  for (const name of ["phase", "rates"])
    controls[name] = choice({ name, label: t(name), change: (value) => set(name, value),
      options: some[name].map((one) => [one, t(`${name}_${one}`, { mfu: percent(mfu), mbu: percent(mbu) })]) });
  for (const name of ["requests", "new", "context"]) {
    const stops = () => model.get("data").stops[name];
    controls[name] = slider({ name, label: t(name === "context" ? "context_decode" : name), max: stops().length - 1,
      text: (at) => number(stops()[at]), change: (at) => set(name, stops()[at]) });
  }
  const contextLabel = controls.context.node.querySelector("label");

  // ---- The chart: log-log, redrawn at the width it has.

  const canvas = svg("svg", { class: "cbp-chart", role: "img" });
  function drawChart(found, gpu, text) {
    const width = Math.max(canvas.parentNode.clientWidth, 240);
    const height = clamp(Math.round(width * 0.55), 220, 320);
    const box = { left: 46, right: width - 14, top: 22, bottom: height - 40 };
    const place = ([low, high], from, to) => (value) => from + (Math.log(value / low) / Math.log(high / low)) * (to - from);
    const [xs, ys] = [data.chart.x, data.chart.y];
    const x = place(xs, box.left, box.right);
    const y = place(ys, box.bottom, box.top);
    const flat = (gpu.flops * gpu.mfu) / 1e12;
    const slope = (gpu.bandwidth * gpu.mbu) / 1e12;
    const ridge = flat / slope;
    const label = (value, anchor, across, down, muted = true) => svg("text", { x: across.toFixed(1), y: down.toFixed(1),
      "text-anchor": anchor, class: muted ? "cbp-muted" : null }, value);
    const grid = [];
    for (let power = 0; power <= 6; power++) {
      const at = x(10 ** power);
      grid.push(svg("path", { class: "cbp-gridline", d: `M${at} ${box.top}V${box.bottom}` }),
        label(compact.format(10 ** power), "middle", at, box.bottom + 15));
    }
    for (let power = -1; power <= 3; power++) {
      const at = y(10 ** power);
      grid.push(svg("path", { class: "cbp-gridline", d: `M${box.left} ${at}H${box.right}` }),
        label(number(10 ** power), "end", box.left - 6, at + 4));
    }
    const middle = ridge / 5; // where the slope has its label
    const points = Object.keys(MARKS).map((name) => {
      const { flops, bytes, seconds } = found[name];
      const where = [x(flops / bytes), y(flops / seconds / 1e12)].map((value) => value.toFixed(1));
      return svg("g", { class: "cbp-point", "data-part": name },
        svg("path", { class: "cbp-drop", d: `M${where[0]} ${where[1]}V${box.bottom}` }),
        svg("path", { class: "cbp-mark", "data-part": name, transform: `translate(${where.join(" ")})`, d: MARKS[name] }));
    });
    canvas.replaceChildren(...grid,
      svg("path", { class: "cbp-roof", d: `M${x(xs[0])} ${y(xs[0] * slope)}L${x(ridge)} ${y(flat)}L${x(xs[1])} ${y(flat)}` }),
      svg("path", { class: "cbp-ridge", d: `M${x(ridge)} ${y(flat)}V${box.bottom}` }),
      label(t("roof_flat", { tflops: short(flat) }), "end", box.right, y(flat) - 7, false),
      label(t("roof_slope", { bandwidth: short(slope) }), "end", x(middle) - 6, y(middle * slope) - 6, false),
      label(t("ridge", { ridge: short(ridge) }), "start", x(ridge) + 5, box.bottom - 7, false),
      label(t("axis_x"), "end", box.right, height - 6), label(t("axis_y"), "start", 2, 12), ...points);
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": text }))
      canvas.setAttribute(name, value);
  }

  // ---- What the numbers say

  const PARTS = ["linear", "head", "attention"];
  const mark = (name) => svg("svg", { class: "cbp-key", viewBox: "-9 -9 18 18", width: 16, height: 16, "aria-hidden": "true" },
    svg("path", { class: "cbp-mark", "data-part": name, d: MARKS[name] }));
  const legend = h("div", { class: "cbp-legend" });
  const total = h("p", { class: "cbp-total" });
  const bar = h("div", { class: "cbp-split", "aria-hidden": "true" });
  const times = h("div", { class: "cbp-times" });
  const figures = h("dl", { class: "cbp-figures" });
  const notes = h("div", { class: "cbp-notes" });
  const table = foldedTable(t("table"), [t("table_part"), ...PARTS.map((name) => t(name)), t("whole")]);

  const sum = (found) => PARTS.reduce((all, name) => all + found[name].seconds, 0);
  const point = (found, name) => t("chart_point", { part: t(name), bound: t(found[name].bound),
    intensity: short(found[name].flops / found[name].bytes), attained: short(found[name].flops / found[name].seconds / 1e12) });
  const pointsText = (found) => ["linear", "attention"].map((name) => point(found, name)).join(" ");

  function spoken() {
    const found = measure(data, setting());
    return t("say", { total: short(1e3 * sum(found)), points: pointsText(found) });
  }

  function remarks(found, now) {
    const decode = now.phase === "decode";
    const tokens = decode ? now.requests : now.new;
    const { tile } = data.gpus[now.gpu];
    const gb = (bytes) => short(bytes / 1e9);
    const { linear, attention } = found;
    const said = [t(`note_linear_${linear.bound}`, { tokens, weights: gb(linear.bytes) })];
    if (linear.bound === "compute" && tokens % tile)
      said.push(t("note_tile", { tile, tokens, rows: Math.ceil(tokens / tile) * tile }));
    said.push(t(`note_attention_${decode ? "decode" : attention.bound}`,
      { kv: gb(attention.bytes), intensity: short(attention.flops / attention.bytes) }));
    const { weights, kv, room, count } = memory(data, now);
    const fits = t(count > 1 ? "fits_not" : "fits", { weights: gb(weights), kv: gb(kv), room: gb(room), count, gpu: now.gpu,
      share: percent(data.utilisation) });
    const rates = t(`say_rates_${now.rates}`, { mfu: percent(mfu), mbu: percent(mbu) });
    return [h("p", {}, said.join(" ")), h("p", { "data-fits": String(count <= 1) }, fits),
      h("p", { class: "cbp-muted" }, `${rates} ${t("arithmetic")}`)];
  }

  function update() {
    const now = setting();
    const found = measure(data, now);
    const gpu = rated(data.gpus[now.gpu], now.rates);
    const decode = now.phase === "decode";
    const all = sum(found);
    const tokens = decode ? now.requests : now.new;
    for (const name of ["model", "gpu", "phase", "rates"]) controls[name].set(now[name]);
    for (const name of ["requests", "new", "context"]) {
      const { stops } = data;
      if (!stops[name].includes(now[name])) { // set from Python
        stops[name] = [...stops[name], now[name]].sort((a, b) => a - b);
        controls[name].limit(stops[name].length - 1);
      }
      controls[name].set(stops[name].indexOf(now[name]));
    }
    contextLabel.textContent = t(`context_${now.phase}`);
    controls.requests.node.hidden = !decode;
    controls.new.node.hidden = decode;

    const flat = gpu.flops * gpu.mfu;
    const slope = gpu.bandwidth * gpu.mbu;
    drawChart(found, gpu, t("chart", { gpu: now.gpu, bandwidth: short(slope / 1e12), ridge: short(flat / slope),
      tflops: short(flat / 1e12), points: pointsText(found) }));
    legend.replaceChildren(...["linear", "attention"].map((name) => {
      const { flops, bytes, seconds, bound } = found[name];
      return h("div", { class: "cbp-entry", "data-part": name }, mark(name), h("div", {},
        h("b", {}, t(name)), h("span", { class: "cbp-bound", "data-bound": bound }, t(bound)),
        h("span", { "data-value": "intensity" }, t("point_intensity", { intensity: short(flops / bytes) })),
        h("span", { "data-value": "attained" }, t("point_attained", { attained: short(flops / seconds / 1e12) }))));
    }));
    total.textContent = t("step", { total: short(1e3 * all) });
    bar.replaceChildren(...PARTS.map((name) => h("i", { "data-part": name, style: `flex-grow: ${found[name].seconds / all}` })));
    times.replaceChildren(...PARTS.map((name) => h("span", { "data-part": name }, h("i", { "aria-hidden": "true" }),
      h("span", {}, t(name)), " ", h("b", {}, t("part_time",
        { ms: short(1e3 * found[name].seconds), share: percent(found[name].seconds / all) })))));
    const shown = { tokens: number(tokens), per_token: t("ms", { ms: short((1e3 * all) / tokens) }),
      weights: t("gigabytes", { gb: short((found.linear.bytes + found.head.bytes) / 1e9) }),
      kv: t("gigabytes", { gb: short(found.attention.bytes / 1e9) }) };
    figures.replaceChildren(...Object.entries(shown).map(([name, value]) =>
      h("div", {}, h("dt", {}, t(`figure_${name}`)), h("dd", { "data-figure": name }, value))));
    notes.replaceChildren(...remarks(found, now));
    const add = (key) => PARTS.reduce((some, name) => some + found[name][key], 0);
    const cells = [...PARTS.map((name) => found[name]), { flops: add("flops"), bytes: add("bytes"), seconds: all }];
    const row = (key, value) => [t(`table_${key}`), ...cells.map(value)];
    table.rows([row("flop", (one) => short(one.flops / 1e9)), row("bytes", (one) => short(one.bytes / 1e9)),
      row("intensity", (one) => short(one.flops / one.bytes)), row("attained", (one) => short(one.flops / one.seconds / 1e12)),
      row("ms", (one) => short(1e3 * one.seconds)), row("bound", (one) => (one.bound ? t(one.bound) : ""))]);
  }

  // ---- All together

  const chart = h("div", { class: "cbp-canvas" }, canvas);
  const root = frame("cbp-roofline", t("title"), language,
    h("div", { class: "cbp-controls cbp-chosen" }, ...["model", "gpu", "phase", "rates"].map((name) => controls[name].node)),
    h("div", { class: "cbp-controls" }, ...["requests", "new", "context"].map((name) => controls[name].node)),
    h("div", { class: "cbp-panel" }, chart, legend),
    h("div", { class: "cbp-panel" }, total, bar, times, figures), notes, table.node, live.node);
  return attach({ model, el, root, names: CHOSEN, update, sized: chart, stop: live.stop });
}

export default { render };
