// A long prompt among running decodes. `parts.js` stands before this text; anywidget calls `render`, and so does the
// static page (static.py). Every time comes from the engine's simulator: model.get("data"), in 0.1 ms.

const LANES = 3; // decodes that are drawn; the others do the same
const GAPS = [30, 30_000]; // the range of the gap chart, in 0.1 ms

// The budgets' verdicts for a limit in ms: gaps beyond it, and the first (largest) budget without any.
export function judge(traces, slo) {
  const limit = 10 * slo;
  return { over: traces.map((one) => one.gaps.filter((gap) => gap > limit).length),
    best: traces.findIndex((one) => one.worst <= limit) };
}

function render({ model, el }) {
  const t = translator(model.get("strings"));
  const language = t("lang");
  const { number, percent } = formats(language);
  const data = model.get("data");
  const { traces } = data;
  const live = liveRegion(400);
  const ms = (tenths, digits = 1) => number(tenths / 10, digits);
  const seconds = (tenths) => number(tenths / 1e4, 2);
  const gigabytes = (tokens) => number((tokens * data.kv) / 1e9, 0);
  const title = (one) => (one.budget === null ? t("budget_none") : t("budget_tokens", { budget: one.budget }));
  const current = () => traces.find((one) => one.budget === model.get("budget"));

  function set(name, value) {
    put(model, { [name]: value });
    const one = current();
    live.say(t("say", { budget: title(one), worst: ms(one.worst), ttft: seconds(one.ttft), steps: one.steps,
      verdict: verdict().join(" ") }));
  }

  // ---- Controls

  const budget = slider({ name: "budget", label: t("budget"), max: traces.length - 1, text: (at) => title(traces[at]),
    change: (at) => set("budget", traces[at].budget) });
  const limit = slider({ name: "slo", label: t("slo"), max: data.slos.length - 1,
    text: (at) => t("ms", { ms: data.slos[at] }), change: (at) => set("slo", data.slos[at]) });

  // ---- Two charts on one clock: who says what when, and how long each token let wait

  const lanes = svg("svg", { role: "img", "data-chart": "lanes" });
  const gaps = svg("svg", { role: "img", "data-chart": "gaps" });
  const low = Math.min(...traces.map((one) => one.times[0]));
  const high = Math.max(...traces.map((one) => one.times.at(-1)));
  const text = (value, anchor, x, y, muted = true) => svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor,
    class: muted ? "cbp-muted" : null }, value);
  const shape = (kind, d, rest = {}) => svg("path", { class: `cbp-${kind}`, d, ...rest });

  function size(node, width, height, label) {
    for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}`, "aria-label": label }))
      node.setAttribute(name, value);
  }

  function draw(one, slo) {
    const width = Math.max(box.clientWidth, 240);
    const [left, right] = [68, width - 8];
    const x = (time) => left + ((time - low) / (high - low)) * (right - left);
    const at = (time) => x(time).toFixed(1);
    const over = one.times.map((time, i) => [time, one.gaps[i]]).filter(([, gap]) => gap > 10 * slo);
    const values = { over: over.length, count: one.gaps.length, slo, worst: ms(one.worst), steps: one.steps };

    const row = 26;
    const top = 20;
    const bottom = top + row * (LANES + 1);
    const lane = (index) => top + row * index + 3;
    const parts = [shape("arrival", `M${at(0)} ${top - 4}V${bottom}`), text(t("arrival"), "start", x(0) - 4, 11),
      x(one.ttft) > right - 40 ? text(t("first_token"), "end", right, 11) : text(t("first_token"), "middle", x(one.ttft), 11)];
    for (let index = 0; index < LANES; index++) {
      const y = lane(index);
      parts.push(text(t("decode", { number: index + 1 }), "end", left - 8, y + 14),
        shape("late", over.map(([time, gap]) => `M${at(time - gap)} ${y + 4}H${at(time)}v12H${at(time - gap)}Z`).join("")),
        shape("tokens", one.times.map((time) => `M${at(time)} ${y}v20`).join(""), { "data-count": one.times.length }));
    }
    const y = lane(LANES);
    parts.push(text(t("newcomer"), "end", left - 8, y + 14),
      shape("chunks", one.chunks.map(([begin, end]) => `M${at(begin)} ${y + 2}H${at(end)}v16H${at(begin)}Z`).join(""),
        { "data-count": one.chunks.length }));
    if (x(one.chunks[0][1]) - x(0) > 4) // where they are wide enough to be told apart
      parts.push(shape("cuts", one.chunks.slice(1).map(([begin]) => `M${at(begin)} ${y + 2}v16`).join("")));
    parts.push(shape("first", `M${at(one.ttft)} ${top - 6}V${y + 20}`));
    lanes.replaceChildren(...parts);
    lanes.dataset.dense = String(x(Math.min(...one.gaps)) - x(0) < 4);
    size(lanes, width, bottom + 4, t("lanes", values));

    const height = 190;
    const [roof, floor] = [12, height - 38];
    const h = (gap) => floor - (Math.log(clamp(gap, ...GAPS) / GAPS[0]) / Math.log(GAPS[1] / GAPS[0])) * (floor - roof);
    const bars = (some) => some.map(([time, gap]) => `M${at(time - gap)} ${floor}V${h(gap).toFixed(1)}H${at(time)}V${floor}Z`).join("");
    const grid = [10, 100, 1000].flatMap((gap) => [shape("gridline", `M${left} ${h(10 * gap)}H${right}`),
      text(number(gap), "end", left - 8, h(10 * gap) + 4)]);
    const ticks = Array.from({ length: Math.floor(high / 5000) + 1 }, (_, i) => i * 5000).flatMap((time) => [
      shape("gridline", `M${at(time)} ${floor}v4`), text(number(time / 1e4), "middle", x(time), floor + 15)]);
    const within = one.times.map((time, i) => [time, one.gaps[i]]).filter(([, gap]) => gap <= 10 * slo);
    const line = h(10 * slo);
    gaps.replaceChildren(...grid, ...ticks, shape("within", bars(within), { "data-count": within.length }),
      shape("beyond", bars(over), { "data-count": over.length }), shape("slo", `M${left} ${line}H${right}`),
      text(t("slo_line", { ms: slo }), "end", right, line - 5, false), text(t("axis_gap"), "start", 0, 10),
      text(t("axis_time"), "end", right, height - 4));
    size(gaps, width, height, t("gaps", values));
  }

  // ---- In words

  function verdict() {
    const slo = model.get("slo");
    const one = current();
    const at = traces.indexOf(one);
    const { over, best } = judge(traces, slo);
    const first = over[at] ? t("missed", { over: over[at], count: one.gaps.length, slo, by: t("ms", { ms: ms(one.worst - 10 * slo) }) })
      : t("met", { slo });
    const alone = traces[0].alone;
    const advice = best < 0 ? t(10 * slo < alone ? "advice_never" : "advice_small", { alone: ms(alone) })
      : best === 0 ? t("advice_none") : best === at ? t("advice_best")
        : t("advice", { budget: title(traces[best]), ttft: seconds(traces[best].ttft) });
    return [first, advice];
  }

  function note(one) {
    const values = { prompt: data.prompt, decodes: data.decodes, chunk: one.chunks[0][2], extra: gigabytes(one.extra),
      times: number(one.extra / data.prompt, 1), own: number((data.prompt * data.kv) / 1e9, 1) };
    return t(one.budget === null ? "note_none" : "note_budget", values);
  }

  const figures = h("dl", { class: "cbp-figures" });
  const judged = h("p", { class: "cbp-verdict" });
  const remark = h("p");

  function update() {
    const one = current();
    const slo = model.get("slo");
    budget.set(traces.indexOf(one));
    if (!data.slos.includes(slo)) { // set from Python
      data.slos = [...data.slos, slo].sort((a, b) => a - b);
      limit.limit(data.slos.length - 1);
    }
    limit.set(data.slos.indexOf(slo));
    draw(one, slo);
    const shown = { worst: t("ms", { ms: ms(one.worst) }), ttft: t("seconds", { s: seconds(one.ttft) }), steps: number(one.steps),
      meanwhile: number(one.times.filter((time) => time > 0 && time <= one.ttft && one.budget !== null).length),
      extra: t("gigabytes", { gb: gigabytes(one.extra) }) };
    figures.replaceChildren(...Object.entries(shown).map(([name, value]) =>
      h("div", {}, h("dt", {}, t(`figure_${name}`)), h("dd", { "data-figure": name }, value))));
    const { over } = judge(traces, slo);
    judged.textContent = verdict().join(" ");
    judged.dataset.met = String(!over[traces.indexOf(one)]);
    remark.textContent = note(one);
    heads[5].textContent = t("column_over", { slo });
    overview.rows(traces.map((each, at) => [each.budget === null ? t("none") : number(each.budget), number(each.steps),
      ms(each.worst), seconds(each.ttft), gigabytes(each.extra), number(over[at])]));
  }

  // ---- All together

  const names = ["budget", "steps", "worst", "ttft", "extra", "over"];
  const overview = foldedTable(t("table"), names.map((name) => t(`column_${name}`)));
  const heads = overview.node.querySelectorAll("thead th");
  const box = h("div", { class: "cbp-canvas" }, lanes, h("p", { class: "cbp-muted cbp-more" },
    t("more", { count: data.decodes - LANES })), gaps);
  const root = frame("cbp-stall", t("title"), language,
    h("div", { class: "cbp-controls" }, budget.node, limit.node),
    h("div", { class: "cbp-panel" }, box), h("div", { class: "cbp-panel" }, figures, judged), h("div", { class: "cbp-notes" },
      remark, h("p", { class: "cbp-muted" }, t("setting", { ...data, mfu: percent(data.mfu), mbu: percent(data.mbu) }))),
    overview.node, live.node);
  return attach({ model, el, root, names: ["budget", "slo"], update, sized: box, stop: live.stop });
}

export default { render };
