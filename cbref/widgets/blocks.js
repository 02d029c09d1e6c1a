// Who holds which block of the KV cache, step by step. anywidget calls `render`; so does the static page (static.py).
// The run and its sentences come from Python (blocks.py); dom.js and parts.js come before this text. There are no words in here.

const SIZE = 4; // tokens a block
const POOLS = ["10", "12", "16"];
const stored = (index, computed) => clamp(computed - SIZE * index, 0, SIZE); // of a table's entry

// What the pool looks like: per block its holders, its tokens, whether it is idle, known by its content, and new.
export function poolOf(frame, before, blocks) {
  const idle = new Set(frame.idle);
  const known = new Set(frame.known);
  const held = (one, block) => one.requests.flatMap(([, , , table], request) => (table.includes(block) ? [request] : []));
  return Array.from({ length: blocks }, (_, block) => {
    const holders = held(frame, block);
    const filled = Math.max(idle.has(block) ? SIZE : 0, ...holders.map((request) => {
      const [, computed, , table] = frame.requests[request];
      return stored(table.indexOf(block), computed);
    }));
    const fresh = before !== undefined && holders.some((request) => !held(before, block).includes(request));
    return { holders, filled, idle: idle.has(block), known: known.has(block), fresh };
  });
}

function render({ model, el }) {
  const words = model.get("strings");
  const t = translator(words);
  const join = (parts) => parts.join(t("list_separator"));
  const mine = (kind, ...children) => h("div", { class: `cbk-${kind}` }, ...children);
  const badge = (request) => h("span", { class: "cbk-badge", "data-request": request }, letter(request));
  const cells = (filled, holders) => h("span", { class: "cbk-cells", "aria-hidden": "true",
    "data-request": holders.length === 1 ? holders[0] : null }, ...Array.from({ length: SIZE }, (_, at) =>
    h("i", { "data-on": at < filled })));
  const requests = model.get("requests");
  let frames, blocks, step, total, timer = null; // the timer is set while playing

  // ---- Changing the state.

  const set = (changes) => put(model, changes);
  function go(to) {
    pause();
    set({ step: clamp(to, 0, total) });
    announce();
  }
  function edit(changes) { // another pool: the same step of it
    pause();
    set(changes);
    set({ step });
    announce();
  }
  function play() {
    if (step >= total) set({ step: 0 });
    timer = setInterval(() => (step + 1 < total ? set({ step: step + 1 }) : go(total)), 1500);
    update();
  }
  function pause() {
    clearInterval(timer);
    timer = null;
    update();
  }
  const announce = () => live.say(t("position", { step, total }) + t("full_stop") + frames[step].say.join(" "));

  // ---- Controls

  const reset = button({ name: "reset", label: t("reset"), icon: "reset", press: () => go(0) });
  const back = button({ name: "back", label: t("back"), icon: "back", press: () => go(step - 1) });
  const toggle = button({ name: "play", label: t("play"), icon: "play", press: () => (timer ? go(step) : play()) });
  const forward = button({ name: "forward", label: t("forward"), icon: "forward", press: () => go(step + 1) });
  const position = h("span", { class: "cbp-muted cbk-position", "aria-hidden": "true" });
  const scrubber = h("input", { type: "range", class: "cbp-range", min: 0, "aria-label": t("scrubber"),
    oninput: () => go(scrubber.valueAsNumber) });
  const size = choice({ name: "num_blocks", label: t("pool_size"), options: POOLS.map((count) => [count, count]),
    change: (count) => edit({ num_blocks: Number(count) }) });
  const caching = choice({ name: "prefix_caching", label: t("caching"),
    options: [["on", t("caching_on")], ["off", t("caching_off")]],
    change: (value) => edit({ prefix_caching: value === "on" }) });

  // ---- The pool

  const poolTitle = h("p", { class: "cbk-head" });
  const pool = h("div", { class: "cbk-pool", role: "list" });

  function tile({ holders, filled, idle, known, fresh }, block) {
    const state = holders.length ? "held" : idle ? "idle" : "free";
    const text = t(`tile_${state}`, { block, names: join(holders.map(letter)), filled, size: SIZE });
    const inside = holders.length ? mine("holders", ...holders.map(badge)) : h("span", { class: "cbp-muted" }, t(state));
    return h("div", { role: "listitem" }, h("div", { class: "cbk-tile", role: "img", "data-block": block,
      "data-state": holders.length > 1 ? "shared" : state, "data-fresh": fresh, "data-known": known,
      "data-request": holders.length === 1 ? holders[0] : null,
      "aria-label": known && !idle ? t("tile_known", { tile: text }) : text },
      h("span", { class: "cbk-number" }, t("number", { block })), inside, cells(filled, holders)));
  }

  // ---- The requests

  const tables = h("div", { class: "cbk-tables", role: "list", "aria-label": t("tables") });

  function row([state, computed, made, table], request, before) {
    const { prompt, output, arrival } = requests[request];
    const values = { step: arrival + 1, prompt, output, stored: computed, made, tokens: prompt + made };
    const entries = table.map((block, index) => {
      const filled = stored(index, computed);
      const shared = frames[step].requests.filter((one) => one[3].includes(block)).length > 1;
      return h("span", { class: "cbk-entry", role: "listitem", "data-block": block, "data-shared": shared,
        "data-fresh": before !== undefined && !before[3].includes(block) },
      h("span", { "aria-hidden": "true" }, t("number", { block })), cells(filled, [request]),
      hidden(t("entry", { block, filled, size: SIZE })));
    });
    return h("div", { class: "cbk-row", role: "listitem", "data-row": request, "data-state": state }, badge(request),
      mine("about", h("div", { class: "cbp-muted" }, t(`state_${state}`, values)),
        entries.length ? h("div", { class: "cbk-entries", role: "list",
          "aria-label": t("table_of", { name: letter(request) }) }, ...entries) : null));
  }

  // ---- Figures, legend, table

  const keys = ["used", "stored", "computed", "again", "hits", "preemptions"];
  const figures = Object.fromEntries(keys.map((key) => [key, h("dd", { "data-figure": key })]));
  const legend = h("div", { class: "cbk-legend", role: "group", "aria-label": t("legend") },
    ...["shared", "idle", "known", "fresh"].map((key) => h("span", { "data-key": key }, h("i", { class: `cbk-key cbk-key-${key}`,
      "aria-hidden": "true" }), t(`legend_${key}`))));
  const all = foldedTable(t("table"), [t("column_step"), ...requests.map((_, request) => letter(request)),
    t("column_event")]);
  all.node.querySelector(".cbp-scroll").before(h("p", { class: "cbp-muted" }, t("table_note")));
  all.node.classList.add("cbk-all");
  const cell = ([, computed, , table]) => (table.length
    ? t("cell", { blocks: join(table.map((block) => t("number", { block }))), stored: computed }) : t("no_blocks"));

  // ---- All together

  const note = h("ul", { class: "cbk-note", "aria-label": t("column_event") });
  const live = liveRegion();
  const root = frame("cbk", t("title"), words.lang,
    h("div", { class: "cbp-bar" }, h("div", { class: "cbp-bar cbk-buttons" }, reset.node, back.node, toggle.node,
      forward.node), position, size.node, caching.node),
    scrubber, note,
    mine("both", h("div", { class: "cbp-panel" }, poolTitle, pool),
      h("div", { class: "cbp-panel" }, h("p", { class: "cbk-head" }, t("tables")), tables)),
    h("dl", { class: "cbp-figures" }, ...keys.map((key) => h("div", {}, h("dt", {}, t(`figure_${key}`)), figures[key]))),
    legend, all.node, live.node);

  let shown = null; // the run that the folded table holds
  function update() {
    blocks = model.get("num_blocks");
    const on = model.get("prefix_caching");
    const key = `${blocks}-${Number(on)}`;
    frames = model.get("traces")[key];
    total = frames.length - 1;
    step = clamp(model.get("step"), 0, total);
    const now = frames[step];
    const before = frames[step - 1];
    note.replaceChildren(...now.say.map((sentence) => h("li", {}, sentence)));
    poolTitle.textContent = t("pool", { blocks, size: SIZE });
    pool.setAttribute("aria-label", poolTitle.textContent);
    const tiles = poolOf(now, before, blocks);
    pool.replaceChildren(...tiles.map(tile));
    tables.replaceChildren(...now.requests.map((one, request) => row(one, request, before?.requests[request])));
    const [computed, again, hits, preemptions] = now.counts;
    const used = tiles.filter(({ holders }) => holders.length);
    const inside = used.reduce((sum, { filled }) => sum + filled, 0);
    const values = { used: t("share", { part: used.length, whole: blocks }), stored: inside, computed, again, hits,
      preemptions };
    for (const name of keys) figures[name].textContent = values[name];
    position.textContent = t("position", { step, total });
    Object.assign(scrubber, { max: total, value: step, ariaValueText: position.textContent });
    size.set(String(blocks));
    caching.set(on ? "on" : "off");
    for (const name of ["idle", "known"]) legend.querySelector(`[data-key=${name}]`).hidden = !on;
    root.classList.toggle("cbp-playing", timer !== null);
    toggle.rename(t(timer ? "pause" : "play"));
    for (const [one, can] of [[reset, step > 0], [back, step > 0], [forward, step < total]]) one.enable(can);
    if (shown !== key) all.rows(frames.map((one, at) => [at, ...one.requests.map(cell), one.say.join(" ")]));
    shown = key;
  }

  return attach({ model, el, root, names: ["num_blocks", "prefix_caching", "step"], update, stop: () => clearInterval(timer) });
}

export default { render };
