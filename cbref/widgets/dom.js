// What every interactive needs. Python puts this file before a module's own text (`source` in static.py).
// Like the modules it has no words, no dependencies, and asks the network for nothing.

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const letter = (request) => String.fromCharCode(65 + request);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes))
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}
// h("p", { class: "note" }, "text", node, …); `on…` attributes are listeners, false and null leave one out.
const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// An id that no other instance in the document has, from whichever copy of this file that one comes.
function uniqueId(kind) {
  const counter = Symbol.for("cbref.instances");
  globalThis[counter] = (globalThis[counter] ?? 0) + 1;
  return `${kind}-${globalThis[counter]}`;
}

// The model holds the state, so that Python and a second view of the same widget follow.
function put(model, changes) {
  for (const name in changes) model.set(name, changes[name]);
  model.save_changes();
}

// Put `root` into the page and keep it up to date: `update` runs at once, when a value of the model named in `names`
// changes, and when the node `sized` gets another width. Returns what ends all this, `stop` first.
function attach({ model, el, root, names, update, sized, stop }) {
  const events = names.map((name) => `change:${name}`);
  for (const event of events) model.on(event, update);
  el.append(root);
  update();
  let seen = sized?.clientWidth;
  const observer = new ResizeObserver(() => {
    if (sized.clientWidth !== seen) update();
    seen = sized.clientWidth;
  });
  if (sized) observer.observe(sized);
  return () => {
    stop();
    observer.disconnect();
    for (const event of events) model.off(event, update);
  };
}
