// Interactive training curves: choice of x-axis, smoothing, visible runs, values by pointer or arrow keys.
// The page has static plots by step: without this script they stay unchanged.
(() => {
  "use strict";
  const source = document.getElementById("curves-data");
  const plots = [...document.querySelectorAll("[data-chart]")];
  if (!source || !plots.length) return;
  const { sides, charts } = JSON.parse(source.textContent);
  const HIGH = 300;
  const [LEFT, RIGHT, TOP, BOTTOM] = [62, 12, 14, 34];
  const AXES = { step: "step", tokens: "answer tokens", seconds: "time" };
  const COLOURS = 7;
  const DASHES = 4;
  const [SIGN_WIDTH, HIGHEST_SIGN] = [13, 3];
  const choice = new Map([...document.querySelectorAll("[data-by]")].map((one) => [one.dataset.by, one]));
  const buttons = [...document.querySelectorAll("[data-side]")];
  const NAMESPACE = plots[0].querySelector("svg").namespaceURI;
  const hidden = new Set();
  const cursors = new Map();

  const number = (value) => {
    if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-GB");
    return String(Number(value.toPrecision(4)));
  };
  const time = (value) => {
    if (value < 120) return `${number(value)} s`;
    return value < 7200 ? `${number(value / 60)} min` : `${number(value / 3600)} h`;
  };
  const compact = (value) => (value >= 1e6 ? `${number(value / 1e6)}M` : value >= 1e4 ? `${number(value / 1e3)}k` : number(value));

  function ticks(low, high, most) {
    const span = high - low;
    if (!(span > 0)) return [low];
    const power = 10 ** Math.floor(Math.log10(span / most));
    const step = [1, 2, 5, 10, 20, 50].map((factor) => factor * power).find((one) => span / one <= most - 1);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * span; k += 1) found.push(Number((k * step).toPrecision(12)));
    return found;
  }

  // Ticks of time are at whole seconds, minutes or hours.
  function along(axis, last, most) {
    if (axis !== "seconds") return ticks(0, last, most).map((value) => [value, compact(value)]);
    const unit = last < 120 ? 1 : last < 7200 ? 60 : 3600;
    return ticks(0, last / unit, most).map((value) => [value * unit, time(value * unit)]);
  }

  // Exponential moving average with bias correction; gaps remain.
  function smoothed(values, weight) {
    if (!weight) return values;
    let sum = 0;
    let norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function part(name, attributes, text) {
    const made = document.createElementNS(NAMESPACE, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function shown(chart, axis) {
    const weight = chart.smooth ? Number(choice.get("smooth").value) / 100 : 0;
    return chart.series
      .filter((one) => !hidden.has(one.side))
      .map((one) => ({ ...one, x: sides[one.side][chart.on][axis], y: smoothed(one.y, weight), low: smoothed(one.low, weight), high: smoothed(one.high, weight) }));
  }

  function draw(plot) {
    const chart = charts[plot.dataset.chart];
    const axis = choice.get("axis").value;
    const series = shown(chart, axis);
    const wide = Math.max(280, plot.clientWidth);
    // The axis covers all curves, also hidden ones, so that hiding a curve does not rescale the plot.
    const last = Math.max(...chart.series.map((one) => sides[one.side][chart.on][axis].at(-1) || 0)) || 1;
    const x = (value) => LEFT + ((wide - LEFT - RIGHT) * value) / last;
    const y = (value) => HIGH - BOTTOM - (HIGH - TOP - BOTTOM) * Math.min(1, Math.max(0, (value - chart.low) / (chart.high - chart.low)));
    const names = series.map((one) => sides[one.side].name).join(", ") || "nothing";
    const label = `${chart.title} by ${AXES[axis]} of ${names}. Arrow keys read values; the table below has numbers.`;
    const svg = part("svg", { viewBox: `0 0 ${wide} ${HIGH}`, height: HIGH, role: "img", "aria-label": label, tabindex: "0" });
    for (const value of ticks(chart.low, chart.high, 6)) {
      svg.append(part("line", { x1: LEFT, x2: wide - RIGHT, y1: y(value), y2: y(value), class: "grid" }));
      svg.append(part("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, number(value)));
    }
    for (const [value, text] of along(axis, last, Math.max(3, Math.floor(wide / 110)))) {
      svg.append(part("text", { x: x(value), y: HIGH - BOTTOM + 24, "text-anchor": x(value) > wide - 30 ? "end" : "middle" }, text));
    }
    const points = (xs, ys) => xs.flatMap((at, k) => (ys[k] === null || ys[k] === undefined ? [] : [`${x(at).toFixed(1)},${y(ys[k]).toFixed(1)}`]));
    for (const one of series) {
      if (!one.low.length) continue;
      const outline = [...points(one.x, one.high), ...points(one.x, one.low).reverse()];
      svg.append(part("polygon", { points: outline.join(" "), class: `band c${one.side % COLOURS}` }));
    }
    const places = [];
    for (const one of series) {
      svg.append(part("polyline", { points: points(one.x, one.y).join(" "), class: `curve c${one.side % COLOURS} d${one.side % DASHES}` }));
      if (chart.on === "vx" && one.x.length <= 60) {
        one.x.forEach((at, k) => svg.append(part("circle", { cx: x(at), cy: y(one.y[k]), r: 3, class: `dot c${one.side % COLOURS}` })));
      }
      for (const [step, tokens, seconds, words, sign] of sides[one.side].marks) {
        const at = x({ step, tokens, seconds }[axis]);
        // Overlapping symbols are stacked.
        const level = Math.min(HIGHEST_SIGN, places.filter((other) => Math.abs(at - other) < SIGN_WIDTH).length);
        places.push(at);
        const mark = part("text", { x: at, y: HIGH - BOTTOM - 3 - SIGN_WIDTH * level, "text-anchor": "middle", class: `mark c${one.side % COLOURS}` }, sign);
        mark.append(part("title", {}, `${sides[one.side].name}: ${words}`));
        svg.append(mark);
      }
    }
    const focused = plot.contains(document.activeElement);
    plot.replaceChildren(svg);
    if (focused) svg.focus();
    listen(plot, svg, { chart, axis, series, x, last, wide });
  }

  function listen(plot, svg, view) {
    const { chart, axis, series, x, last, wide } = view;
    const readout = plot.parentElement.querySelector(".readout");
    const line = part("line", { y1: TOP, y2: HIGH - BOTTOM, class: "cursor", visibility: "hidden" });
    svg.append(line);
    const places = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);

    function read(value) {
      cursors.set(plot, value);
      line.setAttribute("x1", x(value));
      line.setAttribute("x2", x(value));
      line.setAttribute("visibility", "visible");
      const texts = series.map((one) => {
        let k = one.x.findIndex((at) => at >= value);
        if (k < 0 || (k === 0 && value < one.x[0])) k = -1;
        return `${sides[one.side].name} ${k < 0 || one.y[k] === null ? "–" : number(one.y[k])}`;
      });
      const at = axis === "seconds" ? time(value) : `${AXES[axis]} ${number(value)}`;
      readout.textContent = `${at}: ${texts.join(" · ")}`;
    }

    svg.addEventListener("pointermove", (event) => {
      if (!places.length) return;
      const box = svg.getBoundingClientRect();
      const value = (((event.clientX - box.left) * wide) / box.width - LEFT) * (last / (wide - LEFT - RIGHT));
      read(places.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best), places[0]));
    });
    svg.addEventListener("keydown", (event) => {
      const jump = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -10, ArrowUp: 10 }[event.key];
      if (!jump || !places.length) return;
      event.preventDefault();
      const before = places.findIndex((one) => one >= (cursors.get(plot) ?? -1));
      const next = cursors.has(plot) ? Math.min(places.length - 1, Math.max(0, before + jump)) : jump > 0 ? 0 : places.length - 1;
      read(places[next]);
    });
  }

  function again() {
    cursors.clear();
    for (const readout of document.querySelectorAll(".readout")) readout.textContent = "";
    plots.forEach(draw);
  }

  for (const one of choice.values()) one.addEventListener("input", again);
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const side = Number(button.dataset.side);
      if (hidden.has(side)) hidden.delete(side);
      else hidden.add(side);
      button.setAttribute("aria-pressed", String(!hidden.has(side)));
      again();
    });
  }
  document.body.classList.add("live");
  for (const one of document.querySelectorAll("#curves [hidden]")) one.hidden = false;
  again();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) again();
    width = innerWidth;
  });
})();
