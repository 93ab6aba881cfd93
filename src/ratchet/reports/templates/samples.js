// Filters and pages of the flipped samples. The page has all samples: without this script it shows them as a list.
(() => {
  "use strict";
  const PAGE = 10;
  const box = document.getElementById("browser");
  if (!box) return;
  const list = box.querySelector(".list");
  const status = box.querySelector("[role=status]");
  const buttons = [...box.querySelectorAll("[data-kind]")];
  const turns = [...box.querySelectorAll("[data-turn]")];
  const choice = new Map([...box.querySelectorAll("[data-by]")].map((one) => [one.dataset.by, one]));
  const fields = [...choice.keys()].filter((by) => !["reference", "metric", "search"].includes(by));
  const metrics = [...choice.get("metric").options];
  let page = 0;

  const items = [...list.children].map((node) => {
    const kinds = new Map();
    for (const word of node.dataset.k.split(" ")) {
      const [, metric, kind, place] = /^(\d+)([a-z]+)(\d+)$/.exec(word);
      kinds.set(metric, { kind, place: Number(place) });
    }
    return { node, kinds, text: node.textContent.toLowerCase() };
  });

  const pressed = () => new Set(buttons.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.kind));

  // Samples that pass all filters but one.
  function passing(except) {
    const reference = choice.get("reference").value;
    const metric = choice.get("metric").value;
    const kinds = pressed();
    const words = choice.get("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    return items.filter(({ node, kinds: found, text }) => {
      if (node.dataset.r !== reference || !found.has(metric)) return false;
      if (except !== "kind" && !kinds.has(found.get(metric).kind)) return false;
      if (!words.every((word) => text.includes(word))) return false;
      return fields.every((by) => by === except || !choice.get(by).value || node.dataset[by] === choice.get(by).value.slice(1));
    });
  }

  // Metrics of the chosen reference only.
  function offer() {
    const select = choice.get("metric");
    const name = select.selectedOptions.length ? select.selectedOptions[0].text : "";
    const fitting = metrics.filter((one) => one.dataset.r === choice.get("reference").value);
    select.replaceChildren(...fitting);
    select.value = (fitting.find((one) => one.text === name) || fitting[0]).value;
  }

  function counts() {
    const metric = choice.get("metric").value;
    const graded = choice.get("metric").selectedOptions[0].dataset.graded;
    const found = passing("kind");
    for (const button of buttons) {
      const text = button.dataset[graded];
      button.hidden = !text;
      button.children[1].textContent = text;
      button.querySelector("b").textContent = found.filter((item) => item.kinds.get(metric).kind === button.dataset.kind).length.toLocaleString("en-GB");
    }
    for (const by of fields) {
      const select = choice.get(by);
      const chosen = select.value;
      const values = new Map(chosen ? [[chosen.slice(1), 0]] : []);
      const all = passing(by);
      for (const { node } of all) {
        if (by in node.dataset) values.set(node.dataset[by], (values.get(node.dataset[by]) || 0) + 1);
      }
      const sorted = [...values].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1));
      // A value may be empty text, so "all" has no value and other values start with "=".
      select.replaceChildren(new Option(`all (${all.length})`, ""), ...sorted.map(([value, n]) => new Option(`${value} (${n})`, `=${value}`)));
      select.value = chosen;
    }
  }

  function show() {
    counts();
    const metric = choice.get("metric").value;
    const order = buttons.map((one) => one.dataset.kind);
    const found = passing("");
    const rank = (item) => order.indexOf(item.kinds.get(metric).kind) * 1e7 + item.kinds.get(metric).place;
    found.sort((a, b) => rank(a) - rank(b));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    const first = page * PAGE;
    const shown = found.slice(first, first + PAGE);
    list.replaceChildren(...shown.map((item) => item.node));
    status.textContent = found.length ? `${first + 1} to ${first + shown.length} of ${found.length}` : "No sample passes these filters.";
    // A disabled button would lose the focus, so aria-disabled is used instead.
    turns[0].setAttribute("aria-disabled", String(page === 0));
    turns[1].setAttribute("aria-disabled", String(page === pages - 1));
  }

  function again() {
    page = 0;
    show();
  }

  for (const [by, one] of choice) {
    one.addEventListener(by === "search" ? "input" : "change", () => {
      if (by === "reference") offer();
      again();
    });
  }
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      again();
    });
  }
  for (const turn of turns) {
    turn.addEventListener("click", () => {
      if (turn.getAttribute("aria-disabled") === "true") return;
      page += Number(turn.dataset.turn);
      show();
      box.scrollIntoView();
    });
  }
  box.classList.add("live");
  for (const part of box.querySelectorAll("[hidden]")) part.hidden = false;
  offer();
  show();
})();
