"""What the tests of the interactives share."""

import os
import subprocess
import sys

WCAG = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}

# How pages say which theme they are in: attributes of <html>, what the widget has to look like in a dark system.
THEMES = {
    "light": ('data-theme="light"', "light"),
    "book": ('data-theme="dark"', "dark"),
    "colab": ('theme="dark"', "dark"),
    "system": ("", "dark"),
    "book light, system dark": ('data-theme="light"', "light"),
    "jupyterlab": ('data-jp-theme-light="false"', "dark"),
}
# Contrast as WCAG defines it, in JavaScript.
_COLOURS = """    const pen = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const luminance = colour => {
        pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
        const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((m, n) => n - m);
        return (x + 0.05) / (y + 0.05); };
"""


def open_widgets(page, tmp_path, *widgets, html='data-theme="light"'):
    """Open a page from disk that holds the widgets' text/html and nothing else."""
    file = tmp_path / "page.html"
    bodies = "\n".join(widget._repr_mimebundle_()[0]["text/html"] for widget in widgets)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Test</title>'
    file.write_text(f'<!doctype html><html lang="en" {html}><head>{meta}</head><body><main>{bodies}</main>')
    page.goto(file.as_uri())


def comparing_colours(body):
    """JavaScript of a function of `root` whose body may use `luminance(colour)` and `contrast(a, b)`."""
    return "root => {" + _COLOURS + body + "}"


def assert_every_run_writes(html, kind):
    """`cbref.widgets.<kind>()` without arguments has this static HTML in other processes, too."""
    code = f"import sys, cbref.widgets as w; sys.stdout.buffer.write(w.{kind}().static_html().encode())"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        assert output.decode() == html
