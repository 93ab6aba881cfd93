// The page of `ratchet label`: shows a sample, sends the judgement, and repeats a request until the server answers.
(() => {
  "use strict";
  const RETRY_MS = 500;
  const get = (id) => document.getElementById(id);
  const buttons = [...document.querySelectorAll("[data-choice]")];
  const keys = { 1: "first", 2: "second", t: "tie", s: "skip", u: "undo" };
  const token = location.hash.slice(1);
  let rater = "";
  let state = null; // Last reply of the server.
  let busy = false;

  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  function complain(text) {
    get("error").textContent = text;
    get("error").hidden = !text;
  }

  // Only a request that the server does not answer is repeated; repeating a stored judgement changes nothing.
  async function send(path, fields) {
    for (;;) {
      try {
        const reply = await fetch(path, {
          method: "POST",
          headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
          body: JSON.stringify({ rater, ...fields }),
        });
        const found = await reply.json();
        complain(reply.ok ? "" : found.error);
        return reply.ok ? found : null;
      } catch {
        complain("The server does not answer. Your judgement is sent again until it does; keep this page open.");
        await wait(RETRY_MS);
      }
    }
  }

  function show(note) {
    const isOver = state.sample === null;
    get("label").dataset.done = state.done;
    get("progress").textContent = `${rater}: ${state.done} of ${state.total}`;
    get("bar").style.width = `${(100 * state.done) / state.total}%`;
    get("note").value = note;
    for (const id of ["prompt", "answers"]) get(id).hidden = isOver;
    get("end").hidden = !isOver;
    for (const button of buttons) button.disabled = button.dataset.choice === "undo" ? !state.last : isOver;
    if (isOver) return;
    get("prompt").replaceChildren(...state.prompt.map(({ role, text }) => {
      const node = document.createElement("p");
      node.dir = "auto";
      node.textContent = text;
      if (state.prompt.length === 1) return node;
      const name = document.createElement("small");
      name.textContent = role;
      node.prepend(name);
      return node;
    }));
    for (const [number, id] of ["first", "second"].entries()) {
      get(id).textContent = state.answers[number] || "(empty answer)";
    }
    scrollTo(0, 0);
  }

  async function request(path, fields, note) {
    busy = true;
    for (const button of buttons) button.disabled = true;
    const found = await send(path, fields);
    if (found) state = found;
    busy = false;
    if (state) show(found ? note : get("note").value);
  }

  async function choose(choice) {
    if (busy || !state) return;
    if (choice === "undo") {
      if (state.last) await request("/undo", { sample: state.last.sample }, state.last.note);
    } else if (state.sample !== null) {
      await request("/judge", { sample: state.sample, shown: state.shown, choice, note: get("note").value }, "");
    }
  }

  function begin(name) {
    rater = name.trim();
    if (!rater) return;
    try {
      localStorage.setItem("rater", rater);
    } catch {
      // The browser stores nothing; the name is asked again.
    }
    get("who").hidden = true;
    get("label").hidden = false;
    request("/next", {}, "");
  }

  for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.choice));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || get("label").hidden) return;
    if (document.activeElement === get("note")) {
      if (event.key === "Escape") get("note").blur();
      return;
    }
    if (event.key.toLowerCase() === "n") {
      get("note").focus();
      event.preventDefault();
    } else if (keys[event.key.toLowerCase()]) {
      choose(keys[event.key.toLowerCase()]);
      event.preventDefault();
    }
  });
  get("who").addEventListener("submit", (event) => {
    event.preventDefault();
    begin(get("rater").value);
  });

  if (get("label").dataset.named) begin(get("rater").value);
  else {
    try {
      get("rater").value = localStorage.getItem("rater") || "";
    } catch {
      // The browser stores nothing.
    }
    get("who").hidden = false;
    get("rater").focus();
  }
})();
