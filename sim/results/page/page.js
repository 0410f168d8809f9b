"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  // Okabe and Ito's palette, which colour-blind readers tell apart; lighter where the page is dark.
  const light = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#333333", "#3f95c9"];
  const bright = ["#56b4e9", "#ff9f45", "#2fcf9f", "#e6a3c8", "#f0d060", "#f2f2f2", "#9a8cff"];
  // Queueing, prefill, decode, recompute, copies, engine, others, preempted.
  const parts = ["#d55e00", "#e69f00", "#0072b2", "#a0403c", "#8a63d2", "#6b7785", "#56b4e9", "#cc79a7"];
  // Memory, seats, tokens, SLOs, policy, copies, engine, computation, idle.
  const limits = ["#d55e00", "#cc79a7", "#e69f00", "#f0d060", "#a0403c", "#8a63d2", "#6b7785", "#0072b2", "#c9d1d9"];
  const limitsDark = [...limits.slice(0, 8), "#39414a"];

  const colour = (name, isDark) => {
    const list = { p: isDark ? bright : light, c: parts, l: isDark ? limitsDark : limits }[name[1]];
    return name === "@ink" ? (isDark ? "#e7e9ec" : "#1c1e21") : list[Number(name.slice(2)) % list.length];
  };
  const resolved = (value, isDark) => {
    if (typeof value === "string") return /^@(ink|[pcl]\d+)$/.test(value) ? colour(value, isDark) : value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((v) => resolved(v, isDark));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, resolved(v, isDark)]));
    return value;
  };
  const layoutOf = (layout, isDark, width) => {
    const ink = isDark ? "#e7e9ec" : "#1c1e21", line = isDark ? "#39414a" : "#dfe3e8";
    const found = resolved(layout, isDark);
    for (const key of Object.keys(found).filter((k) => /^[xy]axis/.test(k)))
      found[key] = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, fixedrange: false, ...found[key] };
    if (found.xaxis?.title) found.xaxis.title.standoff = 4;
    for (const axis of ["xaxis", "yaxis"])
      found[axis] = { gridcolor: line, zerolinecolor: line, automargin: true, ...found[axis] };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, size: 13, family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif" },
      margin: { l: 8, r: 12, t: 24, b: 8 }, hovermode: "closest",
      hoverlabel: { font: { size: 13 } }, dragmode: width < 600 ? false : "zoom",
      legend: { font: { size: width < 600 ? 11 : 13 }, orientation: "h", yanchor: "top", y: -0.2, x: 0, xanchor: "left", yref: "paper", traceorder: "normal" },
      ...found, ...(width ? { width } : {}),
    };
  };
  const hidden = new Set();
  const draw = (isDark, width) => {
    for (const place of document.querySelectorAll(".chart")) {
      const figure = figures[place.dataset.figure];
      const data = resolved(figure.data, isDark);
      for (const trace of data)
        if ("meta" in trace && hidden.has(`${place.dataset.section}-${trace.meta}`)) trace.visible = false;
      const shown = width || place.clientWidth;
      const layout = layoutOf(figure.layout, isDark, shown);
      const rows = Math.ceil(data.filter((t) => t.showlegend !== false).length / Math.max(1, Math.floor(shown / 230)));
      const legend = data.length > 1 ? 24 * rows + 16 : 0;
      layout.height = figure.layout.height + legend;
      // Below the axis and its title, in shares of the plot's own height.
      layout.legend.y = -(58 / Math.max(20, figure.layout.height - 86));
      layout.margin.b = 62 + legend;
      Plotly.react(place, data, layout, { displayModeBar: false, responsive: false });
    }
    for (const swatch of document.querySelectorAll("[data-swatch]"))
      swatch.style.background = colour(`@p${swatch.dataset.swatch}`, isDark);
  };
  const now = () => draw(dark.matches, 0);
  for (const box of document.querySelectorAll("input[data-policy]"))
    box.addEventListener("change", () => {
      const key = `${box.dataset.section}-${box.dataset.policy}`;
      if (box.checked) hidden.delete(key);
      else hidden.add(key);
      now();
    });
  dark.addEventListener("change", now);
  let timer = 0, width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    clearTimeout(timer);
    timer = setTimeout(now, still.matches ? 0 : 120);
  });
  window.addEventListener("beforeprint", () => draw(false, 680));
  window.addEventListener("afterprint", now);
  now();
  document.documentElement.dataset.ready = "1";
})();
