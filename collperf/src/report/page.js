// Compares two results of `collperf -J`: this page's own and a dropped one, or two dropped ones. Loads nothing.
"use strict";
(() => {
  const drop = document.getElementById("drop"), out = document.getElementById("compared");
  const SVG = "http://www.w3.org/2000/svg";
  const own = { name: "this page", json: JSON.parse(document.getElementById("own").textContent) };

  // Returns an element; text and attributes are set as such, so a file's names cannot become markup.
  const make = (name, attributes = {}, text = "") => {
    const element = attributes.svg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) if (key !== "svg") element.setAttribute(key, value);
    element.textContent = text;
    return element;
  };
  const drawn = (name, attributes, text) => make(name, { svg: true, ...attributes }, text);

  // Returns, for each call, a map from its size to its times.
  const lines = json => {
    const found = new Map();
    for (const row of Array.isArray(json.results) ? json.results : []) {
      for (const [half, place] of [[row.out_of_place, ""], [row.in_place, ", in place"]]) {
        const time = half && Number(half.time ?? half.cputime);
        if (!(time > 0) || !Number.isFinite(row.size)) continue;
        const words = [row.experiment_name, row.redop, row.type].filter(word => word && word !== "none");
        const name = words.join(" ") + (row.root > 0 ? `, root ${row.root}` : "") + place;
        const sizes = found.get(name) ?? found.set(name, new Map()).get(name);
        (sizes.get(row.size) ?? sizes.set(row.size, []).get(row.size)).push(time);
      }
    }
    return found;
  };
  const median = times => [...times].sort((a, b) => a - b)[times.length >> 1];
  const human = bytes => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (bytes < 1024) return `${+bytes.toFixed(1)} ${unit}`;
      bytes /= 1024;
    }
    return `${+bytes.toFixed(1)} GiB`;
  };

  // Returns a function from values to places on a logarithmic axis.
  const axis = (values, from, to) => {
    const [least, most] = [Math.min(...values) / 1.3, Math.max(...values) * 1.3].map(Math.log);
    return value => from + (to - from) * (Math.log(value) - least) / (most - least);
  };

  const chart = (sizes, both) => {
    const svg = drawn("svg", { class: "chart", viewBox: "0 0 574 290", "font-size": 16, style: "max-width: 640px" });
    const times = both.flatMap(of => sizes.flatMap(size => of.get(size)));
    const x = axis(sizes.map(size => Math.max(size, 1)), 70, 530), y = axis(times, 240, 14);
    const ticks = sizes.filter((_, place) => place % Math.ceil(sizes.length / 6) === 0);
    for (const size of ticks) {
      svg.append(drawn("path", { d: `M${x(Math.max(size, 1))} 14V240`, style: "stroke: var(--line)" }));
      svg.append(drawn("text", { x: x(Math.max(size, 1)), y: 260, "text-anchor": "middle", style: "fill: var(--ink)" }, human(size)));
    }
    for (let power = -3; power < 9; power++) {
      const at = y(10 ** power);
      if (at < 14 || at > 240) continue;
      svg.append(drawn("path", { d: `M70 ${at}H530`, style: "stroke: var(--line)" }));
      svg.append(drawn("text", { x: 62, y: at + 5, "text-anchor": "end", style: "fill: var(--ink)" }, String(10 ** power)));
    }
    svg.append(drawn("rect", { x: 70, y: 14, width: 460, height: 226, fill: "none", style: "stroke: var(--frame)" }));
    svg.append(drawn("text", { x: 70, y: 284, style: "fill: var(--soft)" }, "time per call (µs) over size"));
    both.forEach((of, which) => {
      const colour = which ? "var(--b)" : "var(--a)";
      const points = pick => sizes.map(size => `${x(Math.max(size, 1))},${y(pick(of.get(size)))}`);
      const band = [...points(all => Math.max(...all)), ...points(all => Math.min(...all)).reverse()];
      svg.append(drawn("polygon", { points: band.join(" "), style: `fill: ${colour}; opacity: .2` }));
      svg.append(drawn("polyline", { points: points(median).join(" "), style: `fill: none; stroke: ${colour}; stroke-width: 2` }));
      for (const point of points(median)) {
        const [cx, cy] = point.split(",");
        svg.append(drawn("circle", { cx, cy, r: 3.2, style: `fill: ${colour}` }));
      }
    });
    return svg;
  };

  const table = (sizes, [a, b]) => {
    const table = make("table"), head = make("tr");
    for (const name of ["size", "A (µs)", "B (µs)", "B/A"]) head.append(make("th", { class: "number" }, name));
    table.append(head);
    for (const size of sizes) {
      const [before, after] = [median(a.get(size)), median(b.get(size))], ratio = after / before, row = make("tr");
      const mark = ratio > 1.1 ? " bad" : ratio < 1 / 1.1 ? " better" : "";
      for (const [text, more] of [[human(size), ""], [before.toFixed(2), ""], [after.toFixed(2), ""], [ratio.toFixed(3), mark]]) {
        row.append(make("td", { class: "number" + more }, text));
      }
      table.append(row);
    }
    const wide = make("div", { class: "wide" });
    wide.append(table);
    return wide;
  };

  const compare = (a, b) => {
    const label = of => `${of.name}${of.json.start_time ? ` (${of.json.start_time})` : ""}`;
    out.replaceChildren(make("p", { class: "below" }, `A: ${label(a)} · B: ${label(b)}. Medians, with a band from the smallest to the largest.`));
    const [of_a, of_b] = [lines(a.json), lines(b.json)];
    let count = 0;
    for (const [name, sizes_a] of of_a) {
      const sizes_b = of_b.get(name) ?? new Map();
      const sizes = [...sizes_a.keys()].filter(size => sizes_b.has(size)).sort((one, other) => one - other);
      if (!sizes.length) continue;
      count += sizes.length;
      const pair = make("div", { class: "pair" });
      pair.append(chart(sizes, [sizes_a, sizes_b]), table(sizes, [sizes_a, sizes_b]));
      out.append(make("h2", {}, name), pair);
    }
    const legend = make("p", { class: "legend" });
    for (const [name, colour] of [["A", "var(--a)"], ["B", "var(--b)"]]) legend.append(make("b", { style: `color: ${colour}` }, name));
    out.insertBefore(legend, out.children[1] ?? null);
    if (!count) complain("the two results have no call of one size in common");
  };
  const complain = text => out.replaceChildren(make("p", { class: "verdict bad" }, text));

  const read = async files => {
    const results = [];
    for (const file of [...files].slice(0, 2)) {
      if (file.size > 256 << 20) return complain(`${file.name}: a result of more than 256 MiB is not read`);
      try {
        const json = JSON.parse(await file.text());
        if (json === null || !Array.isArray(json.results)) throw new Error("there are no results in it");
        results.push({ name: file.name, json });
      } catch (error) {
        return complain(`${file.name}: this is no result of collperf -J: ${error.message}`);
      }
    }
    // The older one is A.
    results.sort((one, other) => String(one.json.start_time ?? "").localeCompare(String(other.json.start_time ?? "")));
    if (results.length === 2) compare(...results);
    if (results.length === 1) compare(...[results[0], own].sort((one, other) => String(one.json.start_time).localeCompare(String(other.json.start_time))));
  };

  for (const name of ["dragover", "dragleave", "drop"]) {
    document.addEventListener(name, event => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") read(event.dataTransfer.files);
    });
  }
  drop.querySelector("input").addEventListener("change", event => read(event.target.files));
})();
