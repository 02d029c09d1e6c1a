"""Sphinx extension: a bibliography without the roles that docutils gives it.

docutils calls each entry a `doc-biblioentry`, which ARIA has deprecated, within a list, to which it does not belong.
Plain paragraphs say all that there is to say.
"""


def drop_roles(app, pagename, templatename, context, doctree):
    if 'class="citation-list"' in context.get("body", ""):
        body = context["body"].replace(' role="doc-biblioentry"', "")
        context["body"] = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')


def setup(app):
    app.connect("html-page-context", drop_roles)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
