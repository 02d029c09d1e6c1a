// Static against continuous batching, on one clock. anywidget calls `render`; so does the static page (static.py).
// There are no words in here: every text comes from model.get("strings"). No dependencies, no network.

const LIMIT = { requests: 8, length: 20, slots: [2, 3, 4] };
const NEW_LENGTH = 4; // tokens of a request that the reader adds
const SIDES = ["static", "continuous"];

// One token per slot and step, all requests present at step 0, first come first served, lowest free slot first.
export function simulate(lengths, slots) {
  return { static: schedule(lengths, slots, false), continuous: schedule(lengths, slots, true) };
}

function schedule(lengths, slots, continuous) {
  const spans = [];
  const until = Array(slots).fill(0); // the step boundary at which each slot's request is done
  let now = 0;
  while (spans.length < lengths.length || Math.max(...until) > now) {
    // The whole difference between the two: must the engine be empty before it admits again?
    if (continuous || Math.max(...until) <= now)
      for (let slot = 0; slot < slots && spans.length < lengths.length; slot++) {
        if (until[slot] > now) continue;
        const request = spans.length;
        until[slot] = now + lengths[request];
        spans.push({ request, slot, start: now, stop: until[slot] });
      }
    now++;
  }
  const useful = lengths.reduce((sum, length) => sum + length, 0);
  return { spans, steps: now, useful, wasted: slots * now - useful };
}

// One side after `step` steps: who waits, runs and is finished, and what each slot did in each step so far.
function stateAt(side, step, slots) {
  const now = Math.min(step, side.steps);
  const lanes = Array.from({ length: slots }, () => Array(now).fill(null)); // null: no token, a wasted slot-step
  for (const { request, slot, start, stop } of side.spans) lanes[slot].fill(request, start, Math.min(stop, now));
  const tokens = lanes.flat().filter((cell) => cell !== null).length;
  const pick = (test) => side.spans.filter(test).map((span) => span.request);
  return {
    now, lanes, tokens,
    wasted: slots * now - tokens,
    done: step >= side.steps,
    idle: lanes.filter((lane) => lane.at(-1) === null).length, // slots without a token in the latest step
    waiting: pick((span) => span.start >= now),
    running: pick((span) => span.start < now && now < span.stop),
    finished: pick((span) => span.stop <= now),
  };
}

const div = (name, ...children) => h("div", { class: `cbb-${name}` }, ...children);

function render({ model, el }) {
  const words = model.get("strings");
  const t = (key, values = {}) => words[key].replace(/\{(\w+)\}/g, (hole, name) => values[name] ?? hole);
  const percent = new Intl.NumberFormat(words.lang, { style: "percent", maximumFractionDigits: 1 });
  const join = (parts) => parts.join(t("list_separator"));
  const list = (requests) => join(requests.map(letter)) || t("nobody");
  const stretch = ({ start, stop }) => (stop - start === 1 ? stop : t("span", { first: start + 1, last: stop }));
  const badge = (request) => h("span", { class: "cbb-badge", "data-request": request }, letter(request));
  const id = uniqueId("cbb");
  let lengths, slots, run, total, step, timer = null; // the timer is set while playing

  // ---- Changing the state.

  const set = (changes) => put(model, changes);

  function go(to) {
    pause();
    set({ step: clamp(to, 0, total) });
    announce();
  }

  // Who looked at the end of the schedule goes on looking at its end: the effect of the change shows at once.
  function edit(changes) {
    pause();
    const ended = step === total;
    set(changes); // which calls update
    set({ step: ended ? total : step });
    announce();
  }

  function play() {
    if (step >= total) set({ step: 0 });
    const tick = () => (step + 1 < total ? set({ step: step + 1 }) : go(total));
    timer = setInterval(tick, clamp(9000 / total, 150, 700));
    update();
  }

  function pause() {
    timer = clearInterval(timer) ?? null;
    update();
  }

  // ---- In words: a note for everyone, and more for a screen reader after each action (silent while playing).

  function note() {
    const [a, b] = SIDES.map((name) => stateAt(run[name], step, slots));
    if (step === 0) return t("note_start", { count: lengths.length });
    if (a.done && b.done) return t(a.now > b.now ? "note_faster" : "note_same", { static: a.now, continuous: b.now });
    if (b.done) return t("note_ahead", { left: list([...a.running, ...a.waiting]) });
    if (a.idle && a.waiting.length) return t("note_held", { idle: a.idle, slots, waiting: list(a.waiting) });
    return t("note_tokens", { static: a.tokens, continuous: b.tokens });
  }

  function announce() {
    const sides = SIDES.map((name) => {
      const { running, waiting, tokens, wasted, done, now } = stateAt(run[name], step, slots);
      return t(done ? "say_done" : "say_running", { side: t(name), running: list(running), waiting: list(waiting),
        tokens, wasted, steps: now, area: slots * now });
    });
    live.textContent = [t("position", { step, total }) + t("full_stop"), ...(step ? sides : []), note()].join(" ");
  }

  function laneText(name, cells, slot) {
    const runs = run[name].spans.filter((span) => cells.includes(span.request)).map(({ request, start, stop }) =>
      t("lane_run", { name: letter(request), span: stretch({ start, stop: Math.min(stop, cells.length) }) }));
    const wasted = cells.filter((request) => request === null).length;
    return t("lane", { slot: slot + 1, runs: join(runs) || t("nobody"), wasted });
  }

  // ---- Controls. A button with nothing to do stays focusable: the keyboard must not lose its place at the last step.

  function button(name, act, label = t(name)) {
    return h("button", { type: "button", class: `cbb-button cbb-${name}`, "data-action": name,
      onclick: (event) => event.currentTarget.ariaDisabled !== "true" && act() },
      h("i", { class: "cbb-icon", "aria-hidden": "true" }), h("span", { class: "cbb-text" }, label));
  }
  const enable = (node, on) => { node.ariaDisabled = String(!on); };
  const reset = button("reset", () => go(0));
  const back = button("back", () => go(step - 1));
  const toggle = button("play", () => (timer ? go(step) : play()));
  const forward = button("forward", () => go(step + 1));
  const position = h("span", { class: "cbb-position", "aria-hidden": "true" });
  const scrubber = h("input", { type: "range", class: "cbb-scrubber", min: 0, "aria-label": t("scrubber"),
    oninput: () => go(scrubber.valueAsNumber) });
  const radios = LIMIT.slots.map((count) => h("input", { type: "radio", name: `${id}-slots`, value: count,
    id: `${id}-slots-${count}`, "aria-label": t("slot_count", { count }), onchange: () => edit({ slots: count }) }));

  // ---- One panel a side.

  function panel(name) {
    const done = h("span", { class: "cbb-done" });
    const stats = ["step", "tokens", "wasted", "occupancy"].map((key) => h("b", { "data-stat": key }));
    const queues = ["waiting", "finished"].map((key) =>
      h("span", { role: "list", "data-list": key, "aria-labelledby": `${id}-${name}-${key}` }));
    const lanes = h("div", { class: "cbb-lanes", role: "list", "aria-label": t("slots") });
    const axis = h("div", { class: "cbb-axis", "aria-hidden": "true" });
    const chart = div("chart", lanes, axis, div("clock"));
    const node = h("div", { class: "cbb-panel", role: "group", "aria-labelledby": `${id}-${name}`, "data-side": name },
      div("head", h("div", {}, h("span", { class: "cbb-name", id: `${id}-${name}` }, t(name)), done,
        h("p", { class: "cbb-rule" }, t(`rule_${name}`))),
      div("stats", ...stats.map((value) => div("stat", h("span", {}, t(`stat_${value.dataset.stat}`)), value)))),
      div("queues", ...queues.map((chips) => div("queue", h("span", { class: "cbb-label",
        id: chips.getAttribute("aria-labelledby") }, t(chips.dataset.list)), chips))), chart);

    function lane(cells, slot, fresh, width) {
      const track = h("div", { class: "cbb-track", role: "img", "aria-label": laneText(name, cells, slot) });
      for (let at = 0; at < total; at++) {
        const request = cells[at];
        const span = run[name].spans[request];
        const ahead = step < run[name].steps ? "future" : "over"; // beyond this side's end there is nothing to draw
        // Where cells are too narrow for a letter each, one letter opens the bar, if the bar has room for it.
        const legible = span && (width >= 14 || (at === span.start && (span.stop - span.start) * width >= 11));
        track.append(h("i", { "data-state": at >= cells.length ? ahead : span ? "token" : "wasted", "data-step": at,
          "data-request": span ? request : null, "data-first": at === span?.start,
          "data-fresh": fresh && at === cells.length - 1 }, legible ? letter(request) : ""));
      }
      return h("div", { class: "cbb-lane", role: "listitem" }, h("span", { class: "cbb-lane-name", "aria-hidden": "true" },
        h("span", {}, t("slot", { slot: slot + 1 })), h("span", { class: "cbb-short" }, slot + 1)), track);
    }

    function draw(fresh) {
      const { now, tokens, wasted, ...state } = stateAt(run[name], step, slots);
      const width = axis.clientWidth / total;
      chart.style.cssText = `--steps: ${total}; --now: ${now}`;
      chart.classList.toggle("cbb-tight", width < 14);
      lanes.replaceChildren(...state.lanes.map((cells, slot) => lane(cells, slot, fresh && now === step, width)));
      const every = [1, 5].find((count) => count * width >= 20) ?? 10;
      axis.replaceChildren(...Array.from({ length: total }, (_, at) => h("span", {}, (at + 1) % every ? "" : at + 1)));
      const values = [now, tokens, wasted, now ? percent.format(tokens / (slots * now)) : t("unknown")];
      stats.forEach((node, i) => { node.textContent = values[i]; });
      done.textContent = state.done ? t("done", { steps: now }) : "";
      for (const chips of queues) {
        const item = (kind, ...children) => h("span", { class: `cbb-${kind}`, role: "listitem" }, ...children);
        chips.replaceChildren(...state[chips.dataset.list].map((request) =>
          item("chip", badge(request), chips === queues[0] ? lengths[request] : "")));
        if (!chips.firstChild) chips.append(item("label", t("nobody")));
      }
    }
    return { node, draw };
  }

  // ---- The requests, and the whole schedule as a table.

  const add = button("add", () => { edit({ lengths: [...lengths, NEW_LENGTH] }); inputs().at(-1).select(); });
  const cards = div("cards", add);
  const inputs = () => [...cards.querySelectorAll("input")];
  const removers = () => [...cards.querySelectorAll("[data-action=remove]")];

  function card(request) {
    const change = (length) => edit({ lengths: lengths.with(request, clamp(Math.round(length) || 1, 1, LIMIT.length)) });
    const input = h("input", { type: "number", min: 1, max: LIMIT.length, "data-length": request,
      "aria-label": t("length", { name: letter(request), min: 1, max: LIMIT.length }),
      oninput: () => input.value && input.checkValidity() && change(input.valueAsNumber),
      // Left with something out of range: the nearest value in it.
      onchange: () => { change(input.valueAsNumber); input.value = lengths[request]; } });
    const remove = button("remove", () => {
      edit({ lengths: lengths.toSpliced(request, 1) });
      removers().at(Math.min(request, lengths.length - 1)).focus();
    }, t("remove", { name: letter(request) }));
    return div("card", badge(request), input, remove);
  }

  const body = h("tbody");
  const column = (key, attributes) => h("th", { scope: "col", ...attributes }, t(key));
  const table = h("details", { class: "cbb-details" }, h("summary", {}, t("table")), h("table", {},
    h("thead", {}, h("tr", {}, column("column_request", { rowspan: 2 }), column("column_length", { rowspan: 2 }),
      ...SIDES.map((name) => column(name, { colspan: 2, scope: "colgroup" }))),
      h("tr", {}, ...SIDES.flatMap(() => [column("column_slot"), column("column_steps")]))), body));

  function drawRequests() {
    if (inputs().length !== lengths.length) cards.replaceChildren(...lengths.map((_, request) => card(request)), add);
    for (const input of inputs()) // never under the reader's fingers
      if (!input.matches(":focus")) input.value = lengths[input.dataset.length];
    removers().forEach((node) => enable(node, lengths.length > 1));
    enable(add, lengths.length < LIMIT.requests);
    const places = (request) => SIDES.map((name) => run[name].spans[request])
      .flatMap((span) => [span.slot + 1, stretch(span)]);
    body.replaceChildren(...lengths.map((length, request) => h("tr", {}, h("th", { scope: "row" }, letter(request)),
      ...[length, ...places(request)].map((text) => h("td", {}, text)))));
  }

  // ---- All together.

  const panels = SIDES.map(panel);
  const remark = h("p", { class: "cbb-note" });
  const live = h("div", { class: "cbb-sr", role: "status", "aria-live": "polite" });
  const root = h("div", { class: "cbb", role: "group", "aria-label": t("title"), lang: words.lang,
    "data-lm-suppress-shortcuts": true }, // or JupyterLab takes Enter and the arrow keys for its own
    div("bar", div("buttons", reset, back, toggle, forward), position,
      h("fieldset", { class: "cbb-slots" }, h("legend", {}, t("slots")),
        div("segments", ...radios.flatMap((radio) => [radio, h("label", { for: radio.id }, radio.value)])))),
    scrubber, ...panels.map((one) => one.node), remark,
    h("fieldset", { class: "cbb-requests" }, h("legend", {}, t("requests")), cards), table, live);

  function update() {
    const before = step;
    lengths = model.get("lengths");
    slots = model.get("slots");
    run = simulate(lengths, slots);
    total = Math.max(run.static.steps, run.continuous.steps);
    step = clamp(model.get("step"), 0, total);
    panels.forEach((one) => one.draw(step === before + 1));
    remark.textContent = note();
    position.textContent = t("position", { step, total });
    Object.assign(scrubber, { max: total, value: step, ariaValueText: position.textContent });
    for (const radio of radios) radio.checked = Number(radio.value) === slots;
    root.classList.toggle("cbb-playing", timer !== null);
    toggle.lastChild.textContent = t(timer ? "pause" : "play");
    for (const [node, on] of [[reset, step > 0], [back, step > 0], [forward, step < total]]) enable(node, on);
    drawRequests();
  }

  return attach({ model, el, root, names: ["lengths", "slots", "step"], update, sized: root, stop: () => clearInterval(timer) });
}

export default { render };
