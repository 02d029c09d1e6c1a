// The questions of a chapter. anywidget calls `render`; so does the static page (static.py).
// There are no words in here: every text comes from the model. No dependencies, no network, and no answer is kept.

// A number as people write it, or NaN: 1,000 · 1 000 · 1_000 · 0.5 · 0,5 · 50 % · 12 blocks (if that is the unit).
// `decimal` is the language's own sign; the other one groups thousands if what follows it can be read so.
export function parse(text, unit = "", decimal = ".") {
  const plainly = (words) => words.normalize("NFKC").replace(/[−–]/g, "-").replace(/×/g, "x").replace(/`/g, "")
    .toLowerCase().trim();
  const suffix = plainly(unit);
  let rest = plainly(text).replace(/^[≈~=]\s*/, "");
  if (suffix && rest.endsWith(suffix)) rest = rest.slice(0, -suffix.length).trimEnd();
  let scale = 1;
  if (rest.endsWith("%")) {
    rest = rest.slice(0, -1).trimEnd();
    if (!suffix.includes("%")) scale = 100; // half of something may be written as 50 %
  }
  const group = decimal === "," ? "." : ",";
  const grouped = new RegExp(`^[+-]?[1-9]\\d{0,2}([\\s_'’${group}])\\d{3}(\\1\\d{3})*((?!\\1)[.,]\\d+)?$`);
  const separator = grouped.exec(rest)?.[1];
  if (separator) rest = rest.replaceAll(separator, "");
  else if (!/^[+-]?(\d+([.,]\d*)?|[.,]\d+)(e[+-]?\d+)?$/.test(rest)) return NaN;
  return Number(rest.replace(",", ".")) / scale;
}

// The same within the tolerance, give or take what floating point numbers lose.
const close = (value, target, tolerance) => Math.abs(value - target) <= tolerance + 1e-9 * Math.max(1, Math.abs(target));

function label(node, verdict) {
  if (verdict) node.dataset.verdict = verdict;
  else delete node.dataset.verdict;
}

// A text whose `code` is in backticks.
const markup = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

function render({ model, el }) {
  const words = model.get("strings");
  const questions = model.get("questions");
  const total = questions.length;
  const t = (key, values = {}) => words[key].replace(/\{(\w+)\}/g, (hole, name) => values[name] ?? hole);
  const format = new Intl.NumberFormat(words.lang, { maximumSignificantDigits: 12 });
  const decimal = format.formatToParts(0.5).find((part) => part.type === "decimal").value;
  const id = uniqueId("cbq");
  const results = Array(total).fill(null); // of the latest check of each question: right or not
  const live = (name, attributes) => h("div", { class: name, role: "status", "aria-live": "polite", ...attributes });
  const score = live("cbq-score");

  // Each kind of question: its node for the answer, and `judge`, which returns { right, verdict, why }; `right` is null
  // where there is nothing to judge yet.

  function choice(question, at, changed) {
    const options = question.options.map((option, number) => {
      const input = h("input", { type: "radio", name: `${id}-${at}`, value: number, onchange: changed });
      return { ...option, input, node: h("label", { class: "cbq-option" }, input, h("span", {}, ...markup(option.text))) };
    });
    return {
      answer: h("div", { class: "cbq-options" }, ...options.map((option) => option.node)),
      mark(verdict) {
        for (const { input, node } of options) label(node, input.checked ? verdict : null);
      },
      judge() {
        const chosen = options.find((option) => option.input.checked);
        if (!chosen) return { right: null, verdict: "", why: t("nothing_chosen") };
        return { right: chosen.right, verdict: t(chosen.right ? "right" : "wrong"), why: chosen.why };
      },
    };
  }

  function number(question, at, changed) {
    const [unit, feedback] = ["unit", "feedback"].map((part) => `${id}-${at}-${part}`);
    const input = h("input", { type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false",
      id: `${id}-${at}`, class: "cbq-input", "aria-describedby": question.unit ? `${unit} ${feedback}` : feedback,
      oninput: changed });
    return {
      answer: h("div", { class: "cbq-number" }, input,
        question.unit ? h("span", { class: "cbq-unit", id: unit }, ...markup(question.unit)) : ""),
      mark(verdict) {
        input.setAttribute("aria-invalid", verdict === "open");
        label(input, verdict);
      },
      judge() {
        if (!input.value.trim()) return { right: null, verdict: "", why: t("nothing_typed") };
        const value = parse(input.value, question.unit, decimal);
        if (!Number.isFinite(value)) return { right: null, verdict: "", why: t("not_a_number") };
        const { answer, tolerance } = question;
        if (close(value, answer, tolerance)) return { right: true, verdict: t("right"), why: question.right };
        const amount = t("amount", { value: format.format(value), unit: question.unit }).trim();
        const near = question.near.find((one) => close(value, one.value, tolerance));
        return { right: false, verdict: t("wrong_number", { value: amount }), why: near?.why ?? question.wrong };
      },
    };
  }

  function card(question, at) {
    const feedback = live("cbq-feedback", { id: `${id}-${at}-feedback` });
    const clear = () => { // what was said is about another answer
      feedback.replaceChildren();
      label(feedback, null);
      part.mark(null);
    };
    const part = { choice, number }[question.kind](question, at, clear);

    function check() {
      const { right, verdict, why } = part.judge();
      const outcome = right === null ? "open" : right ? "right" : "wrong";
      part.mark(outcome);
      label(feedback, outcome);
      feedback.replaceChildren(h("i", { class: "cbq-icon", "aria-hidden": "true" }),
        h("p", {}, ...(verdict ? [h("strong", {}, ...markup(verdict)), " "] : []), ...markup(why)));
      if (right !== null) results[at] = right;
      sum();
    }

    const ask = [h("span", { class: "cbq-count" }, t("number", { number: at + 1, total })), " ",
      h("span", { class: "cbq-ask" }, ...markup(question.ask))];
    const chosen = question.kind === "choice";
    return h(chosen ? "fieldset" : "div", { class: "cbq-question", "data-question": question.id,
      // No form: the frames that some notebooks show outputs in forbid to submit one.
      onkeydown: (event) => {
        if (event.key !== "Enter" || event.isComposing || !event.target.matches("input")) return;
        event.preventDefault();
        check();
      } },
      chosen ? h("legend", {}, ...ask) : h("label", { for: `${id}-${at}` }, ...ask), part.answer,
      h("button", { type: "button", class: "cbq-check", "aria-label": t("check_number", { number: at + 1 }),
        onclick: check }, t("check")), feedback);
  }

  function sum() {
    const right = results.filter(Boolean).length;
    const text = results.includes(null) ? "" : t(right === total ? "score_all" : "score", { right, total });
    if (score.textContent !== text) score.textContent = text; // said once, not after every check
  }

  el.append(h("div", { class: "cbq", role: "group", "aria-label": t("title"), lang: words.lang,
    "data-lm-suppress-shortcuts": true }, // or JupyterLab takes Enter and the arrow keys for its own
    ...questions.map(card), score));
}

export default { render };
