"use strict";
const boards = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5AA6", "#8C6D31", "#808080"];
const VERDICTS = { correct: "#009E73", wrong_result: "#D55E00", wrong_type: "#E69F00", unstable: "#CC79A7", build_error: "#0072B2", import_error: "#56B4E9",
  runtime_error: "#7A5AA6", cuda_error: "#8C6D31", hang: "#B22222", out_of_memory: "#5F9EA0", integrity_failure: "#000080", track_violation: "#A0522D" };
const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)} %` : `${+(100 * share).toPrecision(2)} %`);
const ratio = (p) => (p >= 1 ? `${p}` : `1/${Math.round(1 / p)}`);

function plots(board, shown) {
  const who = board.authors.filter((_, i) => shown.authors.has(i));
  const color = { domain: board.authors, range: board.authors.map((_, i) => COLOURS[i % COLOURS.length]) };
  const mine = (rows) => rows.filter((d) => who.includes(d.author) && (!d.mode || shown.modes.has(d.mode)));
  const base = { width: 560, marginLeft: 60, marginBottom: 44, style: { fontSize: "12px", background: "transparent" } };
  const rowHeight = 26;
  const labels = (names) => Math.min(240, 24 + 7.5 * Math.max(6, ...names.map((name) => name.length)));
  const short = (name) => (name.length > 28 ? `${name.slice(0, 27)}…` : name);
  return {
    fast: () => {
      const rows = mine(board.fast);
      const top = d3.max(rows, (d) => (d.share > 0 ? d.p : 0)) || 1;
      return Plot.plot({ ...base, height: 320, grid: true, color,
        x: { label: "p, times the reference's speed →", labelOffset: 38, type: "log", domain: [0.25, Math.max(2, 2 * top)], ticks: [0.25, 0.5, 1, 2, 4, 8, 16].filter((p) => p <= Math.max(2, 2 * top)), tickFormat: ratio },
        y: { label: "↑ share of tasks", domain: [0, 1], tickFormat: percent },
        marks: [Plot.ruleX([1], { strokeOpacity: 0.6 }), Plot.ruleY([0]),
          ...board.modes.map((mode) => Plot.line(rows.filter((d) => d.mode === mode), { x: "p", y: "share", stroke: "author", strokeDasharray: mode === "eager" ? "5 4" : null, strokeWidth: 2, curve: "step-after", clip: true })),
          Plot.tip(rows, Plot.pointer({ x: "p", y: "share", title: (d) => `${d.author}, ${d.mode}\nabove ${d.p.toPrecision(3)} times: ${percent(d.share)}` }))] });
    },
    verdicts: () => {
      const rows = mine(board.verdicts), kinds = [...new Set([...Object.keys(VERDICTS), ...rows.map((d) => d.verdict)])].filter((kind) => rows.some((d) => d.verdict === kind));
      return Plot.plot({ ...base, height: 76 + rowHeight * Math.max(2, who.length), marginLeft: labels(who.map(short)), color: { domain: kinds, range: kinds.map((kind) => VERDICTS[kind] ?? "#999"), legend: true },
        x: { label: "samples →", labelOffset: 38, grid: true }, y: { label: null, domain: who, tickFormat: short },
        marks: [Plot.barX(rows, { x: "n", y: "author", fill: "verdict", order: kinds, inset: 0.5, tip: true, title: (d) => `${d.author}\n${d.verdict}: ${d.n}` }), Plot.ruleX([0])] });
    },
    mechanisms: () => {
      const rows = mine(board.mechanisms), names = [...new Set(rows.map((d) => d.mechanism))];
      return Plot.plot({ ...base, height: 82 + who.length * (30 + 18 * names.length), marginTop: 22, marginLeft: 110, marginRight: 20, color: { domain: ["seen", "possible", "loaded"], range: ["#0072B2", "#56B4E9", "#999999"], legend: true },
        x: { label: "correct candidates →", labelOffset: 38, grid: true, tickFormat: "d", interval: 1 }, y: { label: null }, fy: { label: null, domain: who, axis: null, padding: 0.3 },
        marks: [Plot.barX(rows, { x: "n", y: "mechanism", fy: "author", fill: "confidence", order: ["seen", "possible", "loaded"], inset: 1, tip: true, title: (d) => `${d.author}\n${d.mechanism}, ${d.confidence}: ${d.n}` }),
          Plot.text(who, { fy: (d) => d, text: short, frameAnchor: "top-right", dy: -14, fontWeight: 600 }), Plot.ruleX([0])] });
    },
    steps: () => {
      const rows = mine(board.steps);
      return Plot.plot({ ...base, height: 300, grid: true, color, x: { label: "step →", labelOffset: 38, interval: 1, tickFormat: "d" }, y: { label: "↑ share of tasks", domain: [0, 1], tickFormat: percent },
        marks: [Plot.ruleY([0]), Plot.line(rows.filter((d) => d.what === "correct"), { x: "step", y: "share", stroke: "author", strokeWidth: 2, marker: "circle" }),
          Plot.line(rows.filter((d) => d.what !== "correct"), { x: "step", y: "share", stroke: "author", z: (d) => d.author + d.what, strokeDasharray: "5 4", strokeWidth: 1.5, marker: "dot" }),
          Plot.tip(rows, Plot.pointer({ x: "step", y: "share", title: (d) => `${d.author}, ${d.what}\nafter ${d.step}: ${percent(d.share)}` }))] });
    },
    reached: () => {
      const modes = board.modes.filter((m) => shown.modes.has(m)); // of each task and author the last of these that was measured
      const best = d3.rollup(board.reached.filter((d) => modes.includes(d.mode) && (!d.author || who.includes(d.author))), (group) => d3.greatest(group, (d) => modes.indexOf(d.mode)), (d) => `${d.task}\n${d.author ?? ""}`);
      const rows = [...best.values()];
      const tasks = d3.groupSort(rows, (group) => -d3.max(group, (d) => d.share), (d) => d.task);
      const lines = tasks.map((task) => ({ task, low: d3.min(rows, (d) => (d.task === task ? d.share : NaN)), high: d3.max(rows, (d) => (d.task === task ? d.share : NaN)) }));
      const title = (d) => `${d.task}\n${d.author ? `${d.author}: ${d.name}` : "reference"}\n${percent(d.share)} of the bound in ${d.mode} mode, ${d.bound_us.toPrecision(3)} µs by ${d.bound_by} (${d.ceilings})`;
      return Plot.plot({ ...base, width: 1150, height: 84 + 15 * tasks.length, marginLeft: 330, marginTop: 34, color,
        x: { label: "share of the roofline →", labelAnchor: "right", labelOffset: 38, axis: "both", type: "log", domain: [d3.min([0.01, ...rows.map((d) => d.share)]), d3.max([1, ...rows.map((d) => d.share)])], ticks: [0.00001, 0.0001, 0.001, 0.01, 0.1, 0.5, 1], tickFormat: percent, grid: true },
        y: { label: null, domain: tasks, tickSize: 0 },
        marks: [Plot.ruleX([1], { strokeWidth: 1.5 }), Plot.ruleX([0.1, 0.5], { strokeDasharray: "2 3", strokeOpacity: 0.4 }), Plot.ruleY(lines, { y: "task", x1: "low", x2: "high", strokeOpacity: 0.25 }),
          Plot.dot(rows.filter((d) => !d.author), { x: "share", y: "task", r: 4, stroke: "#8a8a8a", strokeWidth: 1.6, href: "href" }),
          Plot.dot(rows.filter((d) => d.author), { x: "share", y: "task", r: 4.5, fill: "author", href: "href" }),
          Plot.tip(rows, Plot.pointer({ x: "share", y: "task", title }))] });
    },
  };
}

for (const section of document.querySelectorAll(".board")) {
  const board = boards[Number(section.dataset.number)];
  const shown = { authors: new Set(board.authors.keys()), modes: new Set(board.modes) };
  let drawn = false;
  const draw = () => {
    drawn = true;
    const makers = plots(board, shown);
    for (const figure of section.querySelectorAll("figure[data-plot]")) figure.replaceChildren(makers[figure.dataset.plot]());
  };
  section.drawOnce = () => drawn || draw();
  for (const button of section.querySelectorAll(".chips button")) {
    const author = button.dataset.author, set = author === undefined ? shown.modes : shown.authors, value = author === undefined ? button.dataset.mode : Number(author);
    if (author !== undefined) button.style.setProperty("--c", COLOURS[value % COLOURS.length]);
    button.addEventListener("click", () => {
      if (!set.delete(value)) set.add(value);
      else if (!set.size) set.add(value); // one stays
      button.setAttribute("aria-pressed", set.has(value));
      draw();
    });
  }
  const table = section.querySelector("table.candidates"), rows = [...table.tBodies[0].rows], texts = rows.map((row) => row.textContent.toLowerCase());
  const [words, verdict, count] = [section.querySelector("input"), section.querySelector("select"), section.querySelector("output")];
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    rows.forEach((row, i) => {
      const fits = (!verdict.value || row.dataset.verdict === verdict.value) && wanted.every((word) => texts[i].includes(word));
      if (row.hidden === fits) row.hidden = !fits;
      visible += fits;
    });
    count.textContent = `${visible} of ${rows.length}`;
  };
  words.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  filter();
}

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const key = (cell, number) => { const text = cell.dataset.value ?? cell.textContent; return number ? (text === "" ? -Infinity : Number(text)) : text.toLowerCase(); };
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const number = "number" in head.dataset, before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : number;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keyed = [...body.rows].map((row) => [key(row.cells[column], number), row]);
    keyed.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1));
    body.append(...keyed.map(([, row]) => row));
  }));
}

const show = (number) => {
  for (const section of document.querySelectorAll(".board")) section.hidden = section.dataset.number !== String(number);
  for (const button of document.querySelectorAll("nav.boards button")) button.setAttribute("aria-pressed", button.dataset.board === String(number));
  document.getElementById(`board-${number}`).drawOnce();
};
for (const button of document.querySelectorAll("nav.boards button")) button.addEventListener("click", () => show(button.dataset.board));
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = dark ? "light" : "dark";
});
let opener = null;
const focusTarget = () => { const at = document.getElementById(location.hash.slice(1)); if (at?.matches("article.candidate")) { opener ??= document.activeElement; at.focus({ preventScroll: true }); } };
addEventListener("hashchange", focusTarget);
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.querySelector("article.candidate:target")) { location.hash = "closed"; opener?.focus?.({ preventScroll: true }); opener = null; }
});
show(0);
focusTarget();
