"use strict";
// Boards, tables and details of candidates; plots.js draws and export.js saves.
const boards = JSON.parse(document.getElementById("data").textContent);

for (const section of document.querySelectorAll(".board")) {
  const board = boards[Number(section.dataset.number)];
  const shown = { authors: new Set(board.authors.keys()), modes: new Set(board.modes) };
  let drawn = false;
  const draw = () => {
    drawn = true;
    const makers = plots(board, shown);
    const figures = [...section.querySelectorAll("figure[data-plot]")], widths = figures.map((figure) => figure.clientWidth); // one layout, not one a figure
    figures.forEach((figure, i) => figure.replaceChildren(makers[figure.dataset.plot](Math.max(260, widths[i]))));
  };
  const choose = () => { // the selects and buttons say what is shown
    for (const button of section.querySelectorAll(".chips button")) button.setAttribute("aria-pressed", shown.authors.has(Number(button.dataset.author)));
    if (authors) authors.value = shown.authors.size === 1 && board.authors.length > 1 ? [...shown.authors][0] : "";
    filter();
    draw();
  };
  section.drawOnce = () => drawn || draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (drawn && !section.hidden && innerWidth !== width) { width = innerWidth; draw(); } else if (section.hidden) drawn = false; });
  const [authors, mode] = ["author", "mode"].map((name) => section.querySelector(`[data-choice=${name}]`));
  authors?.addEventListener("change", () => { shown.authors = new Set(authors.value ? [Number(authors.value)] : board.authors.keys()); choose(); });
  mode?.addEventListener("change", () => { section.dataset.mode = mode.value; shown.modes = new Set(mode.value === "both" ? board.modes : [mode.value]); draw(); });
  for (const button of section.querySelectorAll(".chips button")) {
    const author = Number(button.dataset.author);
    button.style.setProperty("--c", COLOURS[author % COLOURS.length]);
    button.addEventListener("click", () => {
      if (!shown.authors.delete(author) || !shown.authors.size) shown.authors.add(author); // one stays
      choose();
    });
  }
  for (const button of section.querySelectorAll("[data-save]")) button.addEventListener("click", () => {
    const card = button.closest(".plot"), figure = card.querySelector("figure"), heading = card.querySelector("h2").textContent;
    const title = `${heading}: ${section.querySelector("h2").textContent}`;
    const key = ["verdicts", "mechanisms"].includes(figure.dataset.plot) ? [] : [...shown.authors].sort((a, b) => a - b).map((i) => [COLOURS[i % COLOURS.length], board.authors[i]]);
    if (figure.dataset.plot === "reached" || figure.dataset.plot === "sizes") key.push([REFERENCE, "reference"]);
    const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
    (button.dataset.save === "svg" ? saveSvg : printSvg)(exported(figure, title, key), name);
  });
  const table = section.querySelector("table.candidates"), rows = [...table.tBodies[0].rows], texts = rows.map((row) => row.textContent.toLowerCase());
  const [words, verdict, count] = [section.querySelector(".filters input"), section.querySelector(".filters select"), section.querySelector("output")];
  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let visible = 0;
    rows.forEach((row, i) => {
      const fits = (!verdict.value || row.dataset.verdict === verdict.value) && (!authors?.value || row.dataset.author === authors.value) && wanted.every((word) => texts[i].includes(word));
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

const [machines, choice] = [document.getElementById("machines"), document.getElementById("boards")];
const show = (number) => {
  for (const section of document.querySelectorAll(".board")) section.hidden = section.dataset.number !== String(number);
  if (choice) {
    choice.value = String(number);
    machines.value = choice.selectedOptions[0].dataset.machine;
    for (const option of choice.options) option.hidden = option.disabled = option.dataset.machine !== machines.value;
  }
  document.getElementById(`board-${number}`).drawOnce();
};
// The address names the board, so that a link leads to it.
const choose = (number) => { history.replaceState(null, "", `#board-${number}`); show(number); };
choice?.addEventListener("change", () => choose(choice.value));
machines?.addEventListener("change", () => choose([...choice.options].find((option) => option.dataset.machine === machines.value).value));
const boardOf = (hash) => {
  const named = hash.match(/^#(?:board|candidates)-(\d+)$/)?.[1] ?? document.querySelector(`table.candidates a[href="${CSS.escape(hash)}"]`)?.closest(".board").dataset.number;
  return document.getElementById(`board-${named}`) ? Number(named) : 0;
};
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.style.colorScheme ? root.style.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.style.colorScheme = dark ? "light" : "dark";
});
let opener = null;
const focusTarget = () => { const at = document.getElementById(location.hash.slice(1)); if (at?.matches("article.candidate")) { opener ??= document.activeElement; at.focus({ preventScroll: true }); } };
addEventListener("hashchange", () => { if (/^#(board|candidates)/.test(location.hash)) show(boardOf(location.hash)); focusTarget(); });
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.querySelector("article.candidate:target")) { location.hash = "closed"; opener?.focus?.({ preventScroll: true }); opener = null; }
});
show(boardOf(location.hash));
if (/^#(board|candidates)/.test(location.hash)) document.getElementById(location.hash.slice(1))?.scrollIntoView();
focusTarget();
