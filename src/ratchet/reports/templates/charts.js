// Draws the charts of a page with Plotly: light or dark as the browser, and light on paper. On pages of trainings, controls
// choose x-axis, smoothing and visible curves, and arrow keys or the pointer read values.
(async () => {
  "use strict";
  const DARK = {
    "#1c1e21": "#e3e6e9", "#5a6069": "#9aa2ab", "#dddfdb": "#30353b", "#0072b2": "#5aa9e0", "#c25700": "#f0803c",
    "#00795a": "#2fbf95", "#b0498a": "#dd8fba", "#946200": "#e6a417", "#2f8dc4": "#9bd4f5", "#4a4e55": "#c3c8ce",
    "#73777e": "#8b9199", "#b87a00": "#e69f00", "#d55e00": "#f0803c", "#009e73": "#2fbf95",
  };
  const PAPER_PX = 690;
  const packed = document.getElementById("plotly");
  const bytes = Uint8Array.from(atob(packed.textContent), (letter) => letter.charCodeAt(0));
  const library = document.createElement("script");
  library.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  packed.replaceWith(library);

  const [dark, paper] = ["(prefers-color-scheme: dark)", "print"].map((query) => matchMedia(query));
  const axes = JSON.parse(document.getElementById("axes")?.textContent ?? "[]");
  const choice = Object.fromEntries([...document.querySelectorAll("#curves [data-by]")].map((one) => [one.dataset.by, one]));
  const hidden = new Set();
  const charts = [...document.querySelectorAll(".plot")].map((box) => {
    const text = box.querySelector("script").textContent;
    box.replaceChildren();
    return { box, text, cursor: null, traces: [] };
  });

  function template() {
    const style = getComputedStyle(document.documentElement);
    const [ink, quiet, rule, ground] = ["--ink", "--quiet", "--rule", "--paper"].map((name) => style.getPropertyValue(name).trim());
    const axis = { gridcolor: rule, linecolor: quiet, tickcolor: quiet, zeroline: false, automargin: true, exponentformat: "power", minexponent: 5, title: { font: { size: 12 } } };
    const layout = {
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 62, r: 16, t: 16, b: 44 }, xaxis: axis, yaxis: axis, hoverlabel: { bgcolor: ground, font: { color: ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 }, colorway: Object.keys(DARK).slice(3, 10).map((one) => (dark.matches && !paper.matches ? DARK[one] : one)),
    };
    return { layout };
  }

  // Exponential moving average with bias correction; gaps remain.
  function smoothed(values, weight) {
    let [sum, norm] = [0, 0];
    return !weight ? values : values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function draw(chart, onPaper = paper.matches) {
    const isDark = dark.matches && !onPaper;
    const { data, layout } = JSON.parse(chart.text, (key, value) => (isDark && typeof value === "string" && /color$/i.test(key) && DARK[value]) || value);
    for (const trace of data) {
      if (!trace.meta) continue;
      trace.x = axes[trace.meta.side][trace.meta.on][choice.axis.value];
      trace.y = trace.meta.smooth ? smoothed(trace.y, Number(choice.smooth.value) / 100) : trace.y;
      trace.visible = !hidden.has(trace.meta.side);
      layout.xaxis.title = { text: choice.axis.selectedOptions[0].text };
    }
    chart.traces = data.filter((trace) => trace.meta?.named && trace.visible);
    const fixed = onPaper ? { width: PAPER_PX } : {};
    return Plotly.react(chart.box, data, { ...layout, ...fixed, template: template(), uirevision: "same" }, {
      responsive: true, displaylogo: false, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    });
  }

  const number = (value) => (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-GB") : String(Number(value.toPrecision(4))));

  function read(chart, at) {
    chart.cursor = at;
    const texts = chart.traces.map((trace) => {
      const k = trace.x.findIndex((one) => one >= at);
      return `${trace.name} ${k < 0 || (k === 0 && at < trace.x[0]) || trace.y[k] === null ? "–" : number(trace.y[k])}`;
    });
    chart.box.parentElement.querySelector(".readout").textContent = `${choice.axis.selectedOptions[0].dataset.name} ${number(at)}: ${texts.join(" · ")}`;
  }

  function listen(chart) {
    chart.box.on("plotly_hover", (event) => read(chart, event.points[0].x));
    chart.box.addEventListener("keydown", (event) => {
      const jump = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -10, ArrowUp: 10 }[event.key];
      const places = [...new Set(chart.traces.flatMap((trace) => trace.x))].sort((a, b) => a - b);
      if (!jump || !places.length) return;
      event.preventDefault();
      const before = places.findIndex((one) => one >= (chart.cursor ?? -1));
      read(chart, places[chart.cursor === null ? (jump > 0 ? 0 : places.length - 1) : Math.min(places.length - 1, Math.max(0, before + jump))]);
    });
  }

  async function again() {
    for (const chart of charts) chart.cursor = null;
    for (const readout of document.querySelectorAll(".readout")) readout.textContent = "";
    await Promise.all(charts.map((chart) => draw(chart)));
  }

  await again();
  if (axes.length) {
    charts.filter((chart) => chart.box.parentElement.querySelector(".readout")).forEach(listen);
    document.body.classList.add("live");
    for (const one of document.querySelectorAll("#curves [hidden]")) one.hidden = false;
    for (const one of Object.values(choice)) one.addEventListener("input", again);
    for (const button of document.querySelectorAll("#curves [data-side]")) {
      button.addEventListener("click", () => {
        const side = Number(button.dataset.side);
        button.setAttribute("aria-pressed", String(hidden.has(side)));
        if (!hidden.delete(side)) hidden.add(side);
        again();
      });
    }
  }
  for (const query of [dark, paper]) query.addEventListener("change", () => charts.forEach((chart) => draw(chart)));
  addEventListener("beforeprint", () => charts.forEach((chart) => draw(chart, true)));
  addEventListener("afterprint", () => charts.forEach((chart) => draw(chart, false)));
  document.documentElement.dataset.drawn = "true";
})();
