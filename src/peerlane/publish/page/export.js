"use strict";
// A figure as a file of its own: SVG with light colours, a title and the names of the authors; or a printed page of the same size, for PDF.
const SVG = "http://www.w3.org/2000/svg";
const INK = "#14181f", PAPER = "#ffffff", TITLE = 30, LINE = 20;

const element = (name, attributes, text) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};

// ``key``: pairs of colour and name that stand below the title.
function exported(figure, title, key) {
  const box = figure.getBoundingClientRect(), width = Math.ceil(box.width);
  const rows = [[]]; // of the key: a new row where a name does not fit
  let used = 0;
  for (const [colour, name] of key) {
    const need = 28 + 7.6 * name.length;
    if (used && used + need > width - 16) { rows.push([]); used = 0; }
    rows.at(-1).push({ colour, name, x: used + 8 });
    used += need;
  }
  const head = TITLE + (key.length ? LINE * rows.length : 0), height = Math.ceil(box.height) + head;
  const out = element("svg", { xmlns: SVG, viewBox: `0 0 ${width} ${height}`, width, height, color: INK, "font-family": "system-ui, sans-serif", "font-size": 12 });
  out.append(element("rect", { width, height, fill: PAPER }), element("text", { x: 8, y: 20, fill: INK, "font-size": 14, "font-weight": 600 }, title));
  rows.forEach((row, i) => row.forEach(({ colour, name, x }) => {
    const y = TITLE + LINE * i + 10;
    out.append(element("circle", { cx: x + 5, cy: y - 4, r: 5, fill: colour }), element("text", { x: x + 15, y, fill: INK }, name));
  }));
  for (const plot of figure.querySelectorAll("svg")) {
    if (plot.parentElement.closest("svg")) continue; // came with its parent
    const at = plot.getBoundingClientRect(), copy = plot.cloneNode(true);
    for (const tip of copy.querySelectorAll("[aria-label=tip]")) tip.remove();
    for (const link of copy.querySelectorAll("a")) link.replaceWith(...link.childNodes);
    for (const [name, value] of [["x", at.left - box.left], ["y", at.top - box.top + head], ["width", at.width], ["height", at.height]]) copy.setAttribute(name, value);
    out.append(copy);
  }
  for (const swatch of figure.querySelectorAll("[class*=-swatch]")) { // legends are HTML: their words become text
    const mark = swatch.querySelector(":scope > svg"), words = swatch.textContent.trim();
    if (!mark || !words) continue;
    const at = mark.getBoundingClientRect();
    out.append(element("text", { x: at.right - box.left + 5, y: at.top - box.top + head + 12, fill: INK, "font-size": 10 }, words));
  }
  return out;
}

function saveSvg(svg, name) {
  const address = URL.createObjectURL(new Blob([new XMLSerializer().serializeToString(svg)], { type: "image/svg+xml" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `${name}.svg`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// The browser's print dialog writes PDF with text and lines as such; the page has the size of the figure.
function printSvg(svg, name) {
  const sheet = document.createElement("div"), style = document.createElement("style"), title = document.title;
  sheet.id = "sheet";
  sheet.append(svg);
  style.textContent = `@page { size: ${svg.getAttribute("width")}px ${+svg.getAttribute("height") + 1}px; margin: 0 } @media print { body > :not(#sheet) { display: none !important } #sheet, #sheet > svg { display: block !important } }`;
  document.body.append(sheet, style);
  document.title = name;
  addEventListener("afterprint", () => { sheet.remove(); style.remove(); document.title = title; }, { once: true });
  window.print();
}
