// Runs on every page after the theme's scripts, from a server or straight from the disk.
"use strict";

// Draw each formula with KaTeX. Sphinx leaves its TeX as a text node between \( \) or \[ \], next to an equation number.
document.querySelectorAll(".math").forEach((formula) => {
  for (const node of [...formula.childNodes]) {
    if (node.nodeType !== Node.TEXT_NODE || !node.data.trim()) continue;
    const [, open, tex] = node.data.trim().match(/^\\([[(])([^]*)\\[\])]$/) ?? [];
    if (tex === undefined) continue;
    // The starred environments carry no number: Sphinx has already written one.
    const unnumbered = tex.replace(/\\(begin|end)\{(align|alignat|equation|gather)\}/g, "\\$1{$2*}");
    const drawn = document.createElement("span");
    katex.render(unnumbered, drawn, { displayMode: open === "[", throwOnError: false });
    node.replaceWith(drawn);
  }
});

// A formula or table that has to scroll must be reachable by keyboard, and one that need not should be no stop on the way.
function setTabStop(part) {
  if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  else part.removeAttribute("tabindex");
}
const displayed = document.querySelectorAll("div.math, .pst-scrollable-table-container");
const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => setTabStop(target)));
displayed.forEach((part) => resized.observe(part));
document.fonts.addEventListener("loadingdone", () => displayed.forEach(setTabStop));

// On a disk, search cannot read the pages that it would quote from: show the titles alone.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// On paper nothing can be unfolded or clicked: open what is folded, and fold it again afterwards; print addresses of links.
addEventListener("beforeprint", () => {
  document.querySelectorAll(".bd-article a[href^=https]").forEach((link) => {
    if (!/^(https|doi):/.test(link.textContent)) link.dataset.address = link.href;
  });
  document.querySelectorAll("details:not([open])").forEach((part) => {
    part.open = true;
    part.dataset.openedForPrint = "";
  });
});
addEventListener("afterprint", () => {
  document.querySelectorAll("[data-opened-for-print]").forEach((part) => {
    part.open = false;
    delete part.dataset.openedForPrint;
  });
});
