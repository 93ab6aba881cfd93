// Sorting and filters of the table of trials. The page has all trials: without this script they are sorted by number.
(() => {
  "use strict";
  const box = document.getElementById("sweep");
  if (!box) return;
  const body = box.querySelector("tbody");
  const heads = [...box.querySelectorAll("thead th")];
  const buttons = [...box.querySelectorAll("[data-state]")];
  const search = box.querySelector("input");
  const status = box.querySelector("[role=status]");
  const rows = [...body.rows].map((node) => ({
    node,
    cells: [...node.cells].map((cell) => cell.textContent.trim()),
    state: node.querySelector(".state").textContent.trim().split(" ").pop(),
    text: node.textContent.toLowerCase(),
  }));
  const NOTHING = "\u2013";
  const number = (text) => (/^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?$/i.test(text) ? Number(text.replaceAll(",", "")) : NaN);
  let column = 0;
  let upwards = true;

  // Numbers before texts; missing values last in both directions.
  function compare(a, b) {
    const [one, other] = [a.cells[column], b.cells[column]];
    const [nothing, either] = [one === NOTHING || !one, other === NOTHING || !other];
    if (nothing || either) return nothing - either;
    const [x, y] = [number(one), number(other)];
    const order = Number.isNaN(x) || Number.isNaN(y) ? Number.isNaN(x) - Number.isNaN(y) || one.localeCompare(other, "en") : x - y;
    return upwards ? order : -order;
  }

  function show() {
    const states = new Set(buttons.filter((one) => one.getAttribute("aria-pressed") === "true").map((one) => one.dataset.state));
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter(({ state, text }) => states.has(state) && words.every((word) => text.includes(word)));
    found.sort(compare);
    body.replaceChildren(...found.map(({ node }) => node));
    status.textContent = found.length === rows.length ? `${rows.length} trials` : `${found.length} of ${rows.length} trials`;
    heads.forEach((head, place) => {
      if (place === column) head.setAttribute("aria-sort", upwards ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
  }

  heads.forEach((head, place) => {
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: head.textContent });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      upwards = place === column ? !upwards : true;
      column = place;
      show();
    });
  });
  for (const button of buttons) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      show();
    });
  }
  search.addEventListener("input", show);
  for (const part of box.querySelectorAll("[hidden]")) part.hidden = false;
  show();
})();
