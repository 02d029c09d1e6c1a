// Two policies serve the same requests on one clock. anywidget calls `render`; so does the static page (static.py).
// The runs come from Python (race.py); dom.js and parts.js come before this text. There are no words in here.

const UNIT = 100; // of a run's times in a millisecond
const LANE = { row: 11, height: 7 };
const RATES = ["4", "8", "16"];
const POLICIES = ["static", "orca", "prefill_first", "sarathi"];
const SIDES = ["left", "right"];

// A run as Python packed it -> each request's times, in units: [{ arrival, admitted, tokens, finished }].
export function unpack(run) {
  const pauses = new Map(run.idle);
  const ends = [];
  let now = 0;
  run.steps.forEach((length, step) => {
    now += (pauses.get(step) ?? 0) + length;
    ends.push(now);
  });
  return run.requests.map(([arrival, admitted, , finished, runs]) => ({ arrival, admitted, finished,
    tokens: runs.flatMap(([start, stop]) => ends.slice(start, stop)) }));
}

// What can be counted at time `now`; `worst` is the longest time between two tokens of one request, both out by then.
export function stateAt(requests, now) {
  const state = { tokens: 0, running: 0, waiting: 0, finished: 0, worst: null };
  requests.forEach(({ arrival, admitted, tokens, finished }, request) => {
    if (finished <= now) state.finished++;
    else if (admitted <= now) state.running++;
    else if (arrival <= now) state.waiting++;
    for (let i = 0; i < tokens.length && tokens[i] <= now; i++) {
      state.tokens++;
      const gap = tokens[i] - tokens[i - 1];
      if (i && gap > (state.worst?.gap ?? 0)) state.worst = { gap, request, from: tokens[i - 1], to: tokens[i] };
    }
  });
  return state;
}

function render({ model, el }) {
  const words = model.get("strings");
  const t = translator(words);
  const { number } = formats(words.lang);
  const lengths = model.get("requests");
  const traces = model.get("traces");
  const name = (policy) => t(`policy_${policy}`);
  const seconds = (time) => number(time / UNIT / 1000, 2);
  const ms = (time) => number(time / UNIT, 0);
  const gapText = (worst) => (worst ? t("ms", { value: ms(worst.gap) }) : t("none"));
  const setting = model.get("setting"); // what the runs have in common
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  let shown = {}, rate, end, tick, clock, timer = null; // shown: side -> policy; the clock in milliseconds

  // ---- Changing the state.

  const set = (changes) => put(model, changes);
  function go(to) {
    pause();
    set({ clock: clamp(to, 0, end) });
    announce();
  }
  function choose(side, policy) { // the other side's policy: they change places
    const other = SIDES.find((one) => one !== side);
    const previous = shown[side];
    change(shown[other] === policy ? { [side]: policy, [other]: previous } : { [side]: policy });
  }
  function change(changes) { // who looked at the end goes on looking at the end
    pause();
    const ended = clock >= end;
    set(changes); // which calls update
    set({ clock: ended ? end : clock });
    announce();
  }
  function play() {
    if (clock >= end) set({ clock: 0 });
    const stride = calm ? 5 : 1; // the same pace in fewer moves
    timer = setInterval(() => (clock + stride * tick < end ? set({ clock: clock + stride * tick }) : go(end)), 80 * stride);
    update();
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    update();
  }
  const announce = () => live.say(position.textContent + t("full_stop")
    + [...panels.map((one) => one.text()), note.textContent].join(" "));

  // ---- Controls

  const reset = button({ name: "reset", label: t("reset"), icon: "reset", press: () => go(0) });
  const back = button({ name: "back", label: t("back"), icon: "back", press: () => go(clock - tick) });
  const toggle = button({ name: "play", label: t("play"), icon: "play", press: () => (timer ? go(clock) : play()) });
  const forward = button({ name: "forward", label: t("forward"), icon: "forward", press: () => go(clock + tick) });
  const position = h("span", { class: "cbp-muted cbr-position", "aria-hidden": "true" });
  const scrubber = h("input", { type: "range", class: "cbp-range", min: 0, "aria-label": t("scrubber"),
    oninput: () => go(scrubber.valueAsNumber * tick) });
  const options = POLICIES.map((policy) => [policy, name(policy)]);
  const selects = SIDES.map((side) => select({ name: side, label: t(side), options,
    change: (policy) => choose(side, policy) }));
  const rates = choice({ name: "rate", label: t("rate"), options: RATES.map((value) => [value, value]), change: (value) => change({ rate: Number(value) }) });

  // ---- One panel a side: figures, and a lane for each request that the clock uncovers.

  const keys = ["tokens", "running", "waiting", "finished", "worst"];

  function panel(side) {
    const title = h("span", { class: "cbr-name", id: uniqueId("cbr-name") });
    const done = h("span", { class: "cbr-done" });
    const rule = h("p", { class: "cbp-muted" });
    const figures = Object.fromEntries(keys.map((key) => [key, h("dd", { "data-figure": key })]));
    const clip = svg("rect", { x: 0, y: -2, height: "100%" });
    const clipId = uniqueId("cbr-clip");
    const lanes = svg("g", { "clip-path": `url(#${clipId})` });
    const worstBox = svg("rect", { class: "cbr-worst", height: LANE.height });
    const hand = svg("path", { class: "cbr-clock" });
    const axis = svg("g", {});
    const chart = svg("svg", { role: "img", class: "cbr-chart" }, svg("clipPath", { id: clipId }, clip), axis, lanes,
      worstBox, hand);
    const node = h("div", { class: "cbp-panel cbr-panel", role: "group", "aria-labelledby": title.id, "data-side": side },
      h("div", {}, title, done), rule,
      h("dl", { class: "cbr-figures" }, ...keys.map((key) => h("div", {}, h("dt", {}, t(`figure_${key}`)), figures[key]))),
      chart);
    let requests, state, policy, scale, drawn = "";

    function draw(width) { // everything at once; `move` only uncovers it
      const height = lengths.length * LANE.row;
      chart.setAttribute("viewBox", `0 0 ${width} ${height + 16}`);
      chart.setAttribute("width", width);
      chart.setAttribute("height", height + 16);
      scale = (time) => Math.round((1000 * width * time) / (end * UNIT)) / 100 / 10;
      const every = [0.5, 1, 2].find((step) => (step * 1000 * width) / end >= 45) ?? 5;
      const marks = Array.from({ length: Math.floor(end / 1000 / every) + 1 }, (_, at) => at * every);
      axis.replaceChildren(...marks.map((mark) => {
        const x = scale(mark * 1000 * UNIT);
        return svg("g", {}, svg("path", { class: "cbp-gridline", d: `M${x} 0V${height}` }), svg("text", { x, y: height + 13,
          class: "cbp-muted", "text-anchor": mark === 0 ? "start" : x > width - 12 ? "end" : "middle" },
        t("axis", { value: mark })));
      }));
      lanes.replaceChildren(...requests.flatMap(({ arrival, admitted, tokens, finished }, request) => {
        const y = request * LANE.row;
        const middle = y + LANE.height / 2;
        const [x0, x1, x2, x3, x4] = [arrival, admitted, tokens[0], tokens.at(-1), finished].map(scale);
        return [svg("path", { class: "cbr-wait", d: `M${x0} ${middle}H${x1}` }),
          svg("rect", { class: "cbr-prefill", x: x1, y: y + 1, width: Math.max(1, x2 - x1), height: LANE.height - 2 }),
          x4 > x3 ? svg("path", { class: "cbr-held", d: `M${x3} ${middle}H${x4}` }) : null,
          svg("path", { class: "cbr-token", d: tokens.map((at) => `M${scale(at)} ${y}v${LANE.height}`).join("") })];
      }).filter((one) => one !== null));
    }

    function move() {
      state = stateAt(requests, clock * UNIT);
      const x = scale(clock * UNIT);
      clip.setAttribute("width", x);
      hand.setAttribute("d", `M${x} -2V${lengths.length * LANE.row}`);
      worstBox.style.display = state.worst ? "" : "none";
      if (state.worst) {
        const { from, to, request } = state.worst;
        const place = { x: scale(from), y: request * LANE.row, width: Math.max(2, scale(to) - scale(from)) };
        for (const key in place) worstBox.setAttribute(key, place[key]);
      }
      const over = state.finished === requests.length;
      done.textContent = over ? t("done", { end: seconds(Math.max(...requests.map(({ finished }) => finished))) }) : "";
      for (const key of keys) figures[key].textContent = key === "worst" ? gapText(state.worst) : number(state[key]);
      chart.setAttribute("aria-label", text());
    }

    function text() {
      return t("chart", { ...state, policy: name(policy), now: number(clock / 1000, 2), worst: gapText(state.worst) });
    }

    function update(width) {
      policy = shown[side];
      const key = [policy, rate, width, end].join();
      if (key !== drawn) {
        requests = unpack(traces[rate][policy]);
        title.textContent = name(policy);
        rule.textContent = t(`rule_${policy}`, setting);
        draw(width);
      }
      drawn = key;
      move();
    }
    return { node, update, text, state: () => state, requests: () => requests, policy: () => policy };
  }

  // ---- Results of all policies, and each request as a table

  const caption = h("caption");
  const body = h("tbody");
  const columns = ["policy", "ttft_p50", "ttft_p99", "tbt_p99", "total"];
  const results = h("div", { class: "cbp-scroll cbr-results", tabindex: 0, role: "region", "aria-label": t("results") },
    h("table", {}, caption, h("thead", {}, h("tr", {}, ...columns.map((key) =>
      h("th", { scope: "col" }, t(`column_${key}`))))), body));
  function drawResults() {
    caption.textContent = t("results", { rate });
    results.setAttribute("aria-label", caption.textContent);
    body.replaceChildren(...POLICIES.map((policy) => {
      const on = SIDES.some((side) => shown[side] === policy);
      const { figures } = traces[rate][policy];
      return h("tr", { "data-policy": policy, "data-shown": on }, h("th", { scope: "row" },
        on ? t("shown", { policy: name(policy) }) : name(policy)),
      ...figures.map((value, at) => h("td", {}, at < 3 ? number(1000 * value, 0) : number(value, 2))));
    }));
  }

  const all = h("div");
  let listed = "";
  function drawAll() {
    const key = `${rate} ${shown.left} ${shown.right}`;
    if (key === listed) return;
    listed = key;
    const sides = panels.map((one) => [one.requests(), { policy: name(one.policy()) }]);
    const table = foldedTable(t("table"), [...["request", "prompt", "output", "arrival"].map((one) => t(`column_${one}`)),
      ...sides.flatMap(([, values]) => ["ttft", "gap", "end"].map((one) => t(`column_${one}`, values)))]);
    table.node.querySelector(".cbp-scroll").before(h("p", { class: "cbp-muted" }, t("table_note")));
    table.rows(lengths.map(([prompt, output], at) => [at + 1, number(prompt), number(output),
      ms(sides[0][0][at].arrival), ...sides.flatMap(([requests]) => {
        const { arrival, tokens, finished } = requests[at];
        const gaps = tokens.slice(1).map((time, i) => time - tokens[i]);
        return [ms(tokens[0] - arrival), ms(Math.max(...gaps)), ms(finished - arrival)];
      })]));
    table.node.open = all.firstChild?.open ?? false;
    all.replaceChildren(table.node);
  }

  // ---- All together

  const panels = SIDES.map(panel);
  const note = h("p", { class: "cbp-note cbr-note" });
  const live = liveRegion(300);
  const legend = h("div", { class: "cbr-legend", role: "group", "aria-label": t("legend") },
    ...["wait", "prefill", "token", "held", "worst"].map((key) => h("span", {}, svg("svg", { width: 22, height: 9,
      "aria-hidden": "true" }, ...{
      wait: () => [svg("path", { class: "cbr-wait", d: "M0 4.5H22" })],
      prefill: () => [svg("rect", { class: "cbr-prefill", x: 1, y: 2, width: 20, height: 5 })],
      token: () => [svg("path", { class: "cbr-token", d: "M3 1v7M7 1v7M11 1v7M15 1v7M19 1v7" })],
      held: () => [svg("path", { class: "cbr-held", d: "M0 4.5H22" })],
      worst: () => [svg("rect", { class: "cbr-worst", x: 1, y: 1, width: 20, height: 7 })],
    }[key]()), t(`legend_${key}`))));
  const root = frame("cbr", t("title"), words.lang,
    h("div", { class: "cbr-choices" }, ...selects.map((one) => one.node), rates.node),
    h("div", { class: "cbp-bar" }, h("div", { class: "cbp-bar cbr-buttons" }, reset.node, back.node, toggle.node,
      forward.node), position),
    scrubber, ...panels.map((one) => one.node), note, legend, results,
    h("p", { class: "cbp-muted" }, t("results_note")),
    h("p", { class: "cbp-muted" }, t("setting", setting)), all, live.node);

  function update() {
    shown = { left: model.get("left"), right: model.get("right") };
    rate = String(model.get("rate"));
    const longest = Math.max(...SIDES.map((side) => traces[rate][shown[side]].figures.at(-1))) * 1000;
    tick = 10 * Math.ceil(longest / 2000); // at most 200 of these
    end = tick * Math.ceil(longest / tick);
    clock = clamp(model.get("clock"), 0, end);
    const width = Math.max(200, panels[0].node.clientWidth - 28);
    panels.forEach((one) => one.update(width));
    const [a, b] = panels.map((one) => one.state());
    const both = { left: name(shown.left), right: name(shown.right) };
    const over = [a, b].every((state) => state.finished === lengths.length);
    note.textContent = clock === 0 ? t("note_start") : over
      ? t("note_done", { ...both, a: gapText(a.worst), b: gapText(b.worst) })
      : t("note_running", { ...both, a: a.tokens, b: b.tokens });
    position.textContent = t("position", { now: number(clock / 1000, 2), end: number(end / 1000, 2) });
    Object.assign(scrubber, { max: end / tick, value: Math.round(clock / tick), ariaValueText: position.textContent });
    selects.forEach((one, at) => one.set(shown[SIDES[at]]));
    rates.set(rate);
    root.classList.toggle("cbp-playing", timer !== null);
    toggle.rename(t(timer ? "pause" : "play"));
    for (const [one, can] of [[reset, clock > 0], [back, clock > 0], [forward, clock < end]]) one.enable(can);
    drawResults();
    drawAll();
  }

  return attach({ model, el, root, names: ["left", "right", "rate", "clock"], update, sized: root, stop: () => { clearInterval(timer); live.stop(); } });
}

export default { render };
