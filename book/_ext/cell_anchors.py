"""Sphinx extension: every code cell of a notebook can be linked to.

`[the cell](orca.ipynb#cell-1a4bc2e6)` in a page leads to the code cell whose id is 1a4bc2e6. In JupyterLab and on
GitHub the same link opens the notebook.

MyST resolves `file#fragment` by a table of headings that it keeps for each page. Code cells get an id in the page here,
and an entry in that table.
"""

import json
from pathlib import Path

from docutils import nodes


def anchor_cells(app, doctree):
    docname = app.env.docname
    source = Path(app.env.doc2path(docname))
    if source.suffix != ".ipynb":
        return
    cells = json.loads(source.read_text(encoding="utf-8"))["cells"]
    slugs = dict(app.env.metadata[docname].get("myst_slugs", {}))
    for part in doctree.findall(nodes.container):
        if part.get("nb_element") == "cell_code":
            anchor = f"cell-{cells[part['cell_index']]['id']}"
            part["ids"].append(anchor)
            slugs[anchor] = (None, anchor, "cell")    # line, id, text of a link that has none
    app.env.metadata[docname]["myst_slugs"] = slugs


def setup(app):
    app.connect("doctree-read", anchor_cells)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
