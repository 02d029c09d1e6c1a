"""An anywidget that also lives in a page without a kernel.

A notebook stores what a cell displayed. For an ordinary widget that is the id of a model in a kernel long gone. A
`StaticTwin` stores two more things beside it: one line of text, and HTML that needs nothing but itself, which is a
picture drawn by Python plus the widget's own ES module. Where scripts run, the module takes the picture's place.
"""

import html
import json
import operator
import re
from pathlib import Path

import anywidget
import ipywidgets

# The module is inlined rather than imported: a page opened from disk may not import files. An inline module cannot ask
# which <script> it came from, so each copy takes the first box of its kind that is still a picture.
_MOUNT = """
{
  const box = document.querySelector('[data-cbref-widget="%s"]:not([data-cbref-live])');
  if (box) {
    box.dataset.cbrefLive = "";
    const state = JSON.parse(box.querySelector('script[type="application/json"]').textContent);
    const listeners = new Map();
    const model = {
      get: (name) => state[name],
      set(name, value) {
        if (state[name] === value) return;
        state[name] = value;
        for (const listener of listeners.get(`change:${name}`) ?? []) listener();
      },
      save_changes() {},
      on: (event, listener) => listeners.set(event, [...(listeners.get(event) ?? []), listener]),
      off: (event, listener) => listeners.set(event, (listeners.get(event) ?? []).filter((one) => one !== listener)),
    };
    const el = document.createElement("div");
    render({ model, el });
    box.querySelector(".cbref-picture").replaceWith(el);
  }
}
"""


def source(*names: str) -> str:
    """The text of these modules or style sheets, one after the other: a page opened from disk cannot import them."""
    return "\n".join((Path(__file__).parent / name).read_text("utf-8") for name in names)


class StaticTwin(anywidget.AnyWidget):
    """Base class. A subclass sets `kind`, `_esm` (which defines a top-level `render`), `_css`, and the two methods.

    What the methods return is stored in notebooks and compared by tests: the same on every run and every machine.
    """

    kind: str
    _ipython_display_ = None  # ipywidgets 7 (Colab) would display through this and never ask for the bundle

    def summary(self) -> str:
        """One line of plain text."""
        raise NotImplementedError

    def picture(self) -> str:
        """HTML that says the same without scripts."""
        raise NotImplementedError

    def static_html(self) -> str:
        own = set(self.keys) - set(ipywidgets.DOMWidget.class_trait_names())
        state = {name: getattr(self, name) for name in sorted(own) if not name.startswith("_")}
        data = json.dumps(state, ensure_ascii=False, sort_keys=True).replace("<", "\\u003c")
        return (
            f'<div data-cbref-widget="{html.escape(self.kind)}">\n<style>\n{_inline(self._css, "style")}</style>\n'
            f'<div class="cbref-picture">\n{self.picture()}\n</div>\n'
            f'<script type="application/json">{data}</script>\n</div>\n'
            f'<script type="module">\n{_inline(self._esm + _MOUNT % self.kind, "script")}</script>\n'
        )

    def _repr_mimebundle_(self, **kwargs):
        bundle = super()._repr_mimebundle_(**kwargs)
        if bundle is None:  # closed
            return None
        data, metadata = bundle
        return {**data, "text/plain": self.summary(), "text/html": self.static_html()}, metadata


def _inline(source: str, tag: str) -> str:
    """Keep `source` from ending its own element: inside a JS or CSS string `<\\/` means `</`."""
    return re.sub(rf"<(/{tag}|!--)", r"<\\\1", source, flags=re.IGNORECASE)


def integer(name: str, value, low: int, high: int, unit: str = "") -> int:
    """The value of an argument as an `int`; a `ValueError` that names it and its limits if it is none, or outside."""
    try:
        number = operator.index(value)  # numpy integers too
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not low <= number <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}{unit}, got {value!r}")
    return number
