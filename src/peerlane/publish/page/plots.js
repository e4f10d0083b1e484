"use strict";
// The plots of a board, as SVG of the width that a figure has.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5AA6", "#8C6D31", "#808080"];
const REFERENCE = "#8a8a8a";
const VERDICTS = { correct: "#009E73", wrong_result: "#D55E00", wrong_type: "#E69F00", unstable: "#CC79A7", build_error: "#0072B2", import_error: "#56B4E9",
  runtime_error: "#7A5AA6", cuda_error: "#8C6D31", hang: "#B22222", too_slow: "#B8860B", out_of_memory: "#5F9EA0", integrity_failure: "#4B4BC8", track_violation: "#A0522D" };
// Ends that say nothing of a kernel: one grey, told apart by their patterns.
const PATTERNS = { no_code: "M0,8L8,0", truncated: "M0,0L8,8", refused: "M4,0V8", empty: "M4,0V8M0,4H8", not_run: "M0,4H8", no_reply: "M0,8L8,0M0,0L8,8", not_judged: "M4,4h.1", harness_error: "M1,1h6v6h-6z" };
const fillOf = (kind) => VERDICTS[kind] ?? (PATTERNS[kind] ? `url(#of-${kind})` : "#999");
const patterns = (document, kinds) => {
  const make = (name, attributes) => { const made = document.createElementNS("http://www.w3.org/2000/svg", name); for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value); return made; };
  const defs = make("defs", {});
  for (const kind of kinds.filter((name) => PATTERNS[name])) {
    const tile = make("pattern", { id: `of-${kind}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" });
    tile.append(make("rect", { width: 8, height: 8, fill: "#c4c4c4" }), make("path", { d: PATTERNS[kind], fill: "none", stroke: "#4a4a4a", "stroke-width": 1.6, "stroke-linecap": "round" }));
    defs.append(tile);
  }
  return defs;
};
const percent = (share) => (share >= 0.0995 ? `${Math.round(100 * share)} %` : `${+(100 * share).toPrecision(2)} %`);
const ratio = (p) => (p >= 1 ? `${p}` : `1/${Math.round(1 / p)}`);
const times = (p) => `${+p.toPrecision(3)}x`;
const size = (bytes) => { const power = Math.min(3, Math.floor(Math.log2(bytes) / 10)); return `${+(bytes / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB"][power]}`; };

// Makers of the plots by name; each takes the width. ``shown``: the chosen authors and launch modes.
function plots(board, shown) {
  const who = board.authors.filter((_, i) => shown.authors.has(i));
  const color = { domain: board.authors, range: board.authors.map((_, i) => COLOURS[i % COLOURS.length]) };
  const mine = (rows) => rows.filter((d) => who.includes(d.author) && (!d.mode || shown.modes.has(d.mode)));
  const base = { marginLeft: 60, marginBottom: 44, style: { fontSize: "12px", background: "transparent" } };
  const rowHeight = 26;
  const labels = (names, width) => Math.min(Math.round(0.42 * width), 240, 18 + 7.5 * Math.max(3, ...names.map((name) => name.length)));
  const fit = (margin) => (name) => { const most = Math.floor((margin - 10) / 7.5); return name.length > most ? `${name.slice(0, most - 1)}…` : name; };
  const modes = board.modes.filter((mode) => shown.modes.has(mode));
  // Of each task and author the share in the last of the chosen modes that was measured; references of tasks that nobody tried are left out.
  const tried = new Set(board.reached.filter((d) => d.author).map((d) => d.task));
  const reached = () => [...d3.rollup(board.reached.filter((d) => modes.includes(d.mode) && (d.author ? who.includes(d.author) : !tried.size || tried.has(d.task))),
    (group) => d3.greatest(group, (d) => modes.indexOf(d.mode)), (d) => `${d.task}\n${d.author ?? ""}`).values()];
  const share = (d) => `${d.task}\n${d.author ? `${d.author}: ${d.name}` : "reference"}\n${percent(d.share)} of the bound in ${d.mode} mode, ${d.bound_us.toPrecision(3)} µs by ${d.bound_by} (${d.ceilings})`;
  // Ticks of a logarithmic axis in its domain, at least ``room`` pixels apart; those next to 1 first.
  const spaced = (ticks, [low, high], pixels, room) => {
    const at = (tick) => (pixels * Math.log(tick / low)) / Math.log(high / low), kept = [];
    for (const tick of d3.sort(ticks, (tick) => Math.abs(Math.log(tick)))) if (tick >= low && tick <= high && kept.every((other) => Math.abs(at(tick) - at(other)) >= room)) kept.push(tick);
    return kept;
  };
  const shares = (rows) => [d3.min([0.01, ...rows.map((d) => d.share)]) / 1.1, d3.max([1.1, ...rows.map((d) => d.share)])];
  const SHARES = [1, 0.5, 0.1, 0.01, 0.001, 0.0001, 0.00001];
  // On a phone the number of the problem is its label, with the preset if there are several.
  const list = (tasks, width) => {
    const short = (task) => (width < 520 ? [task.split(/[ ,]/)[0], ...task.split(", ").slice(1)].join(" ") : task), margin = labels(tasks.map(short), width);
    return { height: 84 + 15 * tasks.length, width, marginLeft: margin, marginTop: 34, y: { label: null, domain: tasks, tickSize: 0, tickFormat: (task) => fit(margin)(short(task)) } };
  };
  return {
    speeds: (width) => {
      const rows = mine(board.speeds);
      const best = (group) => d3.max(group, (d) => (d.mode === modes.at(-1) ? 1e6 : 1) * d.speedup); // tasks of the main mode first
      const tasks = d3.groupSort(rows, (group) => -best(group), (d) => d.task);
      const domain = [d3.min([0.5, ...rows.map((d) => d.low)]) / 1.1, d3.max([2, ...rows.map((d) => d.high)]) * 1.1];
      const solid = modes.at(-1), layout = list(tasks, width);
      const ticks = spaced([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100], domain, width - layout.marginLeft - 20, 34);
      return Plot.plot({ ...base, ...layout, color,
        x: { label: "speedup →", labelAnchor: "right", labelOffset: 38, axis: "both", type: "log", base: 2, domain, ticks, tickFormat: times, grid: true },
        marks: [Plot.ruleX([1], { strokeWidth: 1.5 }),
          Plot.ruleY(rows, { y: "task", x1: "low", x2: "high", stroke: "author", strokeOpacity: 0.55, strokeWidth: 1.5 }),
          Plot.dot(rows.filter((d) => d.mode !== solid), { x: "speedup", y: "task", r: 3.6, stroke: "author", strokeWidth: 1.5, href: "href" }),
          Plot.dot(rows.filter((d) => d.mode === solid), { x: "speedup", y: "task", r: 4.2, fill: "author", href: "href" }),
          Plot.tip(rows, Plot.pointer({ x: "speedup", y: "task", title: (d) => `${d.task}, ${d.mode}\n${d.author}: ${d.name}\n${d.speedup.toPrecision(3)} times the reference's speed [${d.low.toPrecision(3)}, ${d.high.toPrecision(3)}]\n${d.us.toPrecision(3)} µs, reference ${d.reference_us.toPrecision(3)} µs` }))] });
    },
    reached: (width) => {
      const rows = reached();
      const tasks = d3.groupSort(rows, (group) => -d3.max(group, (d) => d.share), (d) => d.task);
      const lines = tasks.map((task) => ({ task, low: d3.min(rows, (d) => (d.task === task ? d.share : NaN)), high: d3.max(rows, (d) => (d.task === task ? d.share : NaN)) }));
      const domain = shares(rows), layout = list(tasks, width);
      return Plot.plot({ ...base, ...layout, color,
        x: { label: "share of the bound →", labelAnchor: "right", labelOffset: 38, axis: "both", type: "log", base: 2, domain, ticks: spaced(SHARES, domain, width - layout.marginLeft - 20, 54), tickFormat: percent, grid: true },
        marks: [Plot.ruleX([1], { strokeWidth: 1.5 }), Plot.ruleX([0.1, 0.5], { strokeDasharray: "2 3", strokeOpacity: 0.4 }), Plot.ruleY(lines, { y: "task", x1: "low", x2: "high", strokeOpacity: 0.25 }),
          Plot.dot(rows.filter((d) => !d.author), { x: "share", y: "task", r: 4, stroke: REFERENCE, strokeWidth: 1.6, href: "href" }),
          Plot.dot(rows.filter((d) => d.author), { x: "share", y: "task", r: 4.2, fill: "author", href: "href" }),
          Plot.tip(rows, Plot.pointer({ x: "share", y: "task", title: share }))] });
    },
    sizes: (width) => {
      const rows = reached().filter((d) => d.bytes);
      const domain = shares(rows), height = Math.min(420, 200 + 0.35 * width);
      const several = new Set(d3.groups(rows, (d) => `${d.problem}\n${d.author ?? ""}`).filter(([, group]) => group.length > 1).map(([key]) => key));
      const lines = d3.sort(rows.filter((d) => several.has(`${d.problem}\n${d.author ?? ""}`)), (d) => d.bytes);
      const [first, last] = d3.extent(rows, (d) => Math.log2(d.bytes));
      const step = Math.max(2, 2 * Math.ceil((last - first) / (width / 42)));
      const ticks = d3.range(Math.ceil(first / 2) * 2, last + 0.01, step).map((power) => 2 ** power);
      const about = (d) => `${share(d)}\n${size(d.bytes)} a rank`;
      return Plot.plot({ ...base, width, height, color, grid: true,
        x: { label: "message size →", labelOffset: 38, type: "log", base: 2, ticks, tickFormat: size, inset: 8 },
        y: { label: "↑ share of the bound", type: "log", base: 2, domain, ticks: spaced(SHARES, domain, height - 64, 18), tickFormat: percent },
        marks: [Plot.ruleY([1], { strokeWidth: 1.5 }),
          Plot.line(lines.filter((d) => !d.author), { x: "bytes", y: "share", z: "problem", stroke: REFERENCE, strokeOpacity: 0.5, strokeWidth: 1.2 }),
          Plot.line(lines.filter((d) => d.author), { x: "bytes", y: "share", z: (d) => `${d.problem}\n${d.author}`, stroke: "author", strokeOpacity: 0.55, strokeWidth: 1.4 }),
          Plot.dot(rows.filter((d) => !d.author), { x: "bytes", y: "share", r: 3.5, stroke: REFERENCE, strokeWidth: 1.4 }),
          Plot.dot(rows.filter((d) => d.author), { x: "bytes", y: "share", r: 4, fill: "author", href: "href" }),
          Plot.tip(rows, Plot.pointer({ x: "bytes", y: "share", title: about }))] });
    },
    fast: (width) => {
      const rows = mine(board.fast);
      const top = d3.max(rows, (d) => (d.share > 0 ? d.p : 0)) || 1;
      return Plot.plot({ ...base, width, height: 320, grid: true, color,
        x: { label: "p, times the reference's speed →", labelOffset: 38, type: "log", base: 2, domain: [0.25, Math.max(2, 2 * top)], ticks: [0.25, 0.5, 1, 2, 4, 8, 16].filter((p) => p <= Math.max(2, 2 * top)), tickFormat: ratio },
        y: { label: "↑ share of tasks", domain: [0, 1], tickFormat: percent },
        marks: [Plot.ruleX([1], { strokeOpacity: 0.6 }), Plot.ruleY([0]),
          Plot.areaY(rows.filter((d) => d.untimed), { x: "p", y1: "share", y2: "most", z: (d) => `${d.author}\n${d.mode}`, fill: "author", fillOpacity: 0.16, curve: "step-after", clip: true }),
          ...board.modes.map((mode) => Plot.line(rows.filter((d) => d.mode === mode), { x: "p", y: "share", stroke: "author", strokeDasharray: mode === "eager" ? "5 4" : null, strokeWidth: 2, curve: "step-after", clip: true })),
          Plot.tip(rows, Plot.pointer({ x: "p", y: "share", title: (d) => `${d.author}, ${d.mode}\nabove ${d.p.toPrecision(3)} times: ${percent(d.share)}${d.untimed ? `, or ${percent(d.most)} without ${d.untimed} untimed` : ""}` }))] });
    },
    verdicts: (width) => {
      const rows = mine(board.verdicts), kinds = [...new Set([...Object.keys(VERDICTS), ...rows.map((d) => d.verdict)])].filter((kind) => rows.some((d) => d.verdict === kind));
      return Plot.plot({ ...base, width, height: 76 + rowHeight * Math.max(2, who.length), marginLeft: labels(who, width), color: { domain: kinds, range: kinds.map(fillOf), legend: true },
        x: { label: "samples →", labelOffset: 38, grid: true }, y: { label: null, domain: who, tickFormat: fit(labels(who, width)) },
        marks: [(index, scales, values, dimensions, context) => patterns(context.document, kinds), Plot.barX(rows, { x: "n", y: "author", fill: "verdict", order: kinds, inset: 0.5, tip: true, title: (d) => `${d.author}\n${d.verdict}: ${d.n}` }), Plot.ruleX([0])] });
    },
    mechanisms: (width) => {
      const rows = mine(board.mechanisms), names = [...new Set(rows.map((d) => d.mechanism))];
      return Plot.plot({ ...base, width, height: 82 + who.length * (30 + 18 * names.length), marginTop: 22, marginLeft: 110, marginRight: 20, color: { domain: ["seen", "possible", "loaded"], range: ["#0072B2", "#56B4E9", "#999999"], legend: true },
        x: { label: "correct candidates →", labelOffset: 38, grid: true, tickFormat: "d", interval: 1 }, y: { label: null }, fy: { label: null, domain: who, axis: null, padding: 0.3 },
        marks: [Plot.barX(rows, { x: "n", y: "mechanism", fy: "author", fill: "confidence", order: ["seen", "possible", "loaded"], inset: 1, tip: true, title: (d) => `${d.author}\n${d.mechanism}, ${d.confidence}: ${d.n}` }),
          Plot.text(who, { fy: (d) => d, text: (d) => fit(240)(d), frameAnchor: "top-right", dy: -14, fontWeight: 600 }), Plot.ruleX([0])] });
    },
    steps: (width) => {
      const rows = mine(board.steps);
      return Plot.plot({ ...base, width, height: 300, grid: true, color, x: { label: "step →", labelOffset: 38, interval: 1, tickFormat: "d" }, y: { label: "↑ share of tasks", domain: [0, 1], tickFormat: percent },
        marks: [Plot.ruleY([0]), Plot.line(rows.filter((d) => d.what === "correct"), { x: "step", y: "share", stroke: "author", strokeWidth: 2, marker: "circle" }),
          Plot.line(rows.filter((d) => d.what !== "correct"), { x: "step", y: "share", stroke: "author", z: (d) => d.author + d.what, strokeDasharray: "5 4", strokeWidth: 1.5, marker: "dot" }),
          Plot.tip(rows, Plot.pointer({ x: "step", y: "share", title: (d) => `${d.author}, ${d.what}\nafter ${d.step}: ${percent(d.share)}` }))] });
    },
  };
}
