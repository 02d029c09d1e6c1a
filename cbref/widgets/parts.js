// Parts that several interactives share; dom.js comes before this text, and a module's own text after it.

const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const hidden = (text) => h("span", { class: "cbp-sr" }, text);

// number(value, digits): in the language's own writing; `digits` decimals, always as many.
// number(value): at most three. percent(share, digits).
function formats(language) {
  const made = new Map();
  const format = (options) => {
    const key = JSON.stringify(options);
    if (!made.has(key)) made.set(key, new Intl.NumberFormat(language, options));
    return made.get(key);
  };
  const fixed = (digits) => (digits === undefined ? {} : { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return {
    number: (value, digits) => format(fixed(digits)).format(value),
    percent: (share, digits = 0) => format({ style: "percent", ...fixed(digits) }).format(share),
  };
}

// t(key, { name: value }): the text of that key; numbers are written as the language writes them, strings stay.
function translator(words) {
  const { number } = formats(words.lang);
  const show = (value) => (typeof value === "number" ? number(value) : value);
  return (key, values = {}) => {
    if (!(key in words)) throw new Error(`no text "${key}"`);
    return words[key].replace(/\{(\w+)\}/g, (hole, name) => (name in values ? show(values[name]) : hole));
  };
}

// What a screen reader is told after an action; a word repeated is heard once, a quick series only at its end.
function liveRegion(wait = 0) {
  const node = h("div", { class: "cbp-sr", role: "status", "aria-live": "polite" });
  let timer = null;
  const say = (text) => {
    clearTimeout(timer);
    if (wait) timer = setTimeout(() => { node.textContent = text; }, wait);
    else node.textContent = text;
  };
  return { node, say, stop: () => clearTimeout(timer) };
}

// A slider with its name and its value in words. `text(value)` gives those words; `change(value)` is called by the
// reader's own moves only; `set(value)` moves it from outside. A value is an integer from min to max.
function slider({ name, label, min = 0, max, text = String, change }) {
  const id = uniqueId("cbp-slider");
  const value = h("output", { class: "cbp-value", for: id, "aria-live": "off" });
  const input = h("input", { type: "range", id, min, max, step: 1, class: "cbp-range", "data-name": name,
    oninput: () => { show(); change(input.valueAsNumber); } });
  const show = () => {
    value.textContent = text(input.valueAsNumber);
    input.setAttribute("aria-valuetext", value.textContent);
  };
  const set = (to) => { input.value = to; show(); };
  const limit = (to) => { input.max = to; show(); };
  const node = h("div", { class: "cbp-slider" }, h("label", { for: id }, label), value, input);
  return { node, input, set, limit, show };
}

// A list to choose from; `options` is [[value, text], …]. `change(value)` by the reader's choice only.
function select({ name, label, options, change }) {
  const id = uniqueId("cbp-select");
  const input = h("select", { id, "data-name": name, onchange: () => change(input.value) },
    ...options.map(([value, text]) => h("option", { value }, text)));
  const node = h("div", { class: "cbp-select" }, h("label", { for: id }, label), input);
  return { node, input, set: (value) => { input.value = value; } };
}

// A few choices side by side (radio buttons); `options` is [[value, text], …], values are strings.
function choice({ name, label, options, change }) {
  const id = uniqueId("cbp-choice");
  const radios = options.map(([value], at) => h("input", { type: "radio", name: id, id: `${id}-${at}`, value,
    "data-name": name, onchange: () => change(value) }));
  const node = h("fieldset", { class: "cbp-choice" }, h("legend", {}, label), h("div", { class: "cbp-segments" },
    ...radios.flatMap((radio, at) => [radio, h("label", { for: radio.id }, options[at][1])])));
  const set = (value) => radios.forEach((radio) => { radio.checked = radio.value === value; });
  return { node, radios, set };
}

// A button. One with nothing to do (`enable(false)`) stays focusable, so that the keyboard does not lose its place.
function button({ name, label, press, icon }) {
  const text = h("span", { class: "cbp-text" }, label);
  const node = h("button", { type: "button", class: "cbp-button", "data-action": name,
    onclick: () => node.getAttribute("aria-disabled") !== "true" && press() },
    icon ? h("i", { class: `cbp-icon cbp-icon-${icon}`, "aria-hidden": "true" }) : null, text);
  return { node, enable: (on) => node.setAttribute("aria-disabled", String(!on)),
    rename: (label) => { text.textContent = label; } };
}

// The outer box of an interactive. JupyterLab would take Enter and the arrow keys for its own, hence the attribute.
const frame = (kind, label, language, ...children) => h("div", { class: `cbp ${kind}`, role: "group",
  "aria-label": label, lang: language, "data-lm-suppress-shortcuts": "true" }, ...children);

// A table under a fold. `fill(rows)`: each row an array, its first entry the row's head.
function foldedTable(summary, columns) {
  const body = h("tbody");
  const node = h("details", { class: "cbp-details" }, h("summary", {}, summary), h("div", { class: "cbp-scroll",
    tabindex: 0, role: "region", "aria-label": summary }, h("table", {}, h("thead", {}, h("tr", {},
    ...columns.map((text) => h("th", { scope: "col" }, text)))), body)));
  const rows = (all) => body.replaceChildren(...all.map(([head, ...cells]) => h("tr", {},
    h("th", { scope: "row" }, head), ...cells.map((text) => h("td", {}, text)))));
  return { node, rows };
}
