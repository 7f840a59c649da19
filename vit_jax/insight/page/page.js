// The controls of the page: each sets properties of the Bokeh figures.
(function () {
  "use strict";
  const element = (id) => document.getElementById(id);
  const figures = () => Bokeh.documents.flatMap((d) => d.roots()).filter((f) => f.y_range.type !== "FactorRange");
  const create = (name) => new (Bokeh.Models.get(name))();

  function setAxis(direction, kind) {
    const log = kind === "log";
    for (const figure of figures()) {
      const range = figure[direction + "_range"];
      range.scale_hint = log ? "log" : "auto";
      figure[direction + "_scale"] = create(log ? "LogScale" : "LinearScale");
      const axis = (direction === "x" ? figure.below : figure.left).find((a) => "ticker" in a);
      axis.ticker = create(log ? "LogTicker" : "BasicTicker");
      const grid = figure.center.find((g) => g.type === "Grid" && g.dimension === (direction === "x" ? 0 : 1));
      if (grid) grid.ticker = axis.ticker;
      figure.reset.emit();
    }
  }

  function redraw() {
    const field = element("smoothing").value;
    const shown = new Set([...document.querySelectorAll("[data-run]:checked")].map((box) => +box.dataset.run));
    for (const figure of figures()) {
      for (const renderer of figure.renderers) {
        const tag = renderer.tags[0];
        const smoothed = field !== "value";
        renderer.visible = shown.has(tag.run) && (!tag.raw || smoothed);
        if (!tag.raw && !tag.band) renderer.glyph.y = { field: field };
      }
    }
    for (const note of document.querySelectorAll(".smoothing-note")) {
      note.textContent = field === "value" ? "" : ", " + element("smoothing").selectedOptions[0].text + " (pale: as logged)";
    }
  }

  function start() {
    // A finger that moves over a chart scrolls the page, until a tool is chosen.
    if (!Bokeh.documents.length) return requestAnimationFrame(start);
    if (matchMedia("(pointer: coarse)").matches) {
      for (const figure of Bokeh.documents.flatMap((d) => d.roots())) figure.toolbar.active_drag = null;
    }
  }

  if (!element("controls")) return;
  for (const direction of ["x", "y"]) {
    element(direction + "_axis").addEventListener("change", (e) => setAxis(direction, e.target.value));
  }
  element("smoothing").addEventListener("change", redraw);
  for (const box of document.querySelectorAll("[data-run]")) box.addEventListener("change", redraw);
  element("controls").hidden = false;
  start();
})();
