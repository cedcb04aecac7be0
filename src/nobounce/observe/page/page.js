"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const GIB = 2 ** 30;
  const WAYS = ["fastpath", "fallback", "cached", "copy", "error"];
  const scale = { domain: WAYS, range: WAYS.map((w) => `var(--${w})`) };
  const reduced = (limit) => ({ domain: limit, range: limit.map((w) => `var(--${w})`) });
  const $ = (id) => document.getElementById(id);

  function bytes(n) {
    for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", GIB], ["MiB", 2 ** 20], ["KiB", 1024]])
      if (n >= size) return `${(n / size).toFixed(n / size < 10 ? 2 : 1)} ${unit}`;
    return `${n} B`;
  }

  // Space for labels of 12 pixels beside the bars.
  const room = (labels, width) => Math.min(width * 0.55, 16 + 6.8 * Math.max(...labels.map((l) => l.length)));

  function put(id, label, options) {
    const box = $(id);
    if (!options) { box.textContent = "Nothing to show."; return null; }
    const width = Math.max(280, Math.floor(box.clientWidth));
    const figure = Plot.plot({ width, ariaLabel: label, style: { overflow: "visible" }, ...options(width) });
    box.replaceChildren(figure);
    return figure;
  }

  function rows(pairs) {
    const list = document.createElement("dl");
    for (const [name, value] of pairs) {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      list.append(term, text);
    }
    return list;
  }

  function facts(s) {
    const found = [["track", s.track], ["from", `${s.from_ms.toFixed(3)} ms`], ["took", `${(s.to_ms - s.from_ms).toFixed(3)} ms`]];
    for (const [name, value] of Object.entries(s.args)) {
      if (value === null || name === "receipt") continue;
      found.push([name, typeof value === "number" && /bytes|requested/.test(name) ? `${value} (${bytes(value)})` : String(value)]);
    }
    for (const [name, value] of Object.entries(s.args.receipt || {}))
      found.push([`receipt: ${name}`, typeof value === "object" ? JSON.stringify(value) : String(value)]);
    return found;
  }

  function show(s) {
    const box = $("detail");
    const head = document.createElement("b");
    head.textContent = `${s.name} (${s.kind}, ${s.way})`;
    box.className = `detail ${s.way}`;
    box.replaceChildren(head, rows(facts(s)));
    box.hidden = false;
  }

  // Names of tracks differ at their ends: stream and thread numbers.
  function short(name) {
    const bare = name.replace(/ on [a-z]+(:[0-9]+)?$/, "");
    return bare.length > 14 ? `${bare.slice(0, 6)}…${bare.slice(-6)}` : bare;
  }

  function timeline() {
    const slices = data.slices;
    const tracks = [...new Set(slices.map((s) => s.track))];
    const figure = put("plot-timeline", "Timeline of transfers by track", slices.length && ((width) => ({
      height: Math.max(120, 34 * tracks.length + 60),
      marginLeft: width < 500 ? 110 : room(tracks, width),
      x: { label: "milliseconds", grid: true, ticks: width < 500 ? 3 : 8 },
      y: { label: null, domain: tracks, tickFormat: (t) => (width < 500 ? short(t) : t) },
      color: { ...scale, legend: false },
      marks: [
        Plot.barX(slices, { x1: "from_ms", x2: "to_ms", y: "track", fill: "way", fillOpacity: 0.85,
          title: (s) => `${s.name}, ${(s.to_ms - s.from_ms).toFixed(3)} ms` }),
        Plot.ruleX([0]),
      ],
    })));
    if (!figure) return;
    const bars = [...figure.querySelectorAll('g[aria-label="bar"] rect')];
    bars.forEach((bar, i) => {
      const s = slices[i];
      if (Number(bar.getAttribute("width")) < 1.5) bar.setAttribute("width", 1.5);
      if (s.kind !== "transfer" && s.kind !== "batch") { const h = Number(bar.getAttribute("height")); bar.setAttribute("height", h / 2); bar.setAttribute("y", Number(bar.getAttribute("y")) + h / 2); }
      bar.dataset.slice = i;
      bar.setAttribute("role", "button");
      bar.setAttribute("tabindex", i === 0 ? 0 : -1);
      bar.setAttribute("aria-label", `${s.name}, ${s.way}, ${s.track}, at ${s.from_ms.toFixed(3)} milliseconds`);
    });
    const go = (from, to) => {
      if (!bars[to]) return;
      bars[from].setAttribute("tabindex", -1);
      bars[to].setAttribute("tabindex", 0);
      bars[to].focus();
    };
    figure.addEventListener("click", (event) => {
      const i = event.target.dataset && event.target.dataset.slice;
      if (i !== undefined) show(slices[i]);
    });
    figure.addEventListener("keydown", (event) => {
      const i = event.target.dataset && event.target.dataset.slice;
      if (i === undefined) return;
      const at = Number(i);
      const moves = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: bars.length - 1 };
      if (event.key === "Enter" || event.key === " ") show(slices[at]);
      else if (event.key in moves) go(at, moves[event.key]);
      else return;
      event.preventDefault();
    });
  }

  function draw() {
    const byReason = data.totals.by_reason;
    put("plot-reasons", "Bytes by backend and reason", byReason.length && ((width) => ({
      marginLeft: room(byReason.map((d) => `${d.backend}: ${d.reason}`), width), height: 34 * byReason.length + 50,
      x: { label: "bytes", tickFormat: bytes, grid: true, ticks: width < 500 ? 1 : 6 },
      y: { label: null }, color: scale,
      marks: [
        Plot.barX(byReason, { x: "nbytes", y: (d) => `${d.backend}: ${d.reason}`, fill: "backend", title: (d) => `${d.nbytes} bytes` }),
        Plot.text(byReason, { x: "nbytes", y: (d) => `${d.backend}: ${d.reason}`, text: (d) => bytes(d.nbytes), textAnchor: "start", dx: 4, fill: "currentColor" }),
      ], marginRight: 70,
    })));
    const bars = data.roofs.flatMap((r) => [
      { label: `${r.way}: measured`, way: r.way.split(" ")[0], rate: r.measured / GIB },
      ...r.limits.map(([name, limit]) => ({ label: `${r.way}: ${name}`, way: "copy", rate: limit / GIB })),
    ]);
    put("plot-roof", "Measured rate against limits", bars.length && ((width) => ({
      marginLeft: room(bars.map((b) => b.label), width), marginRight: 50, height: 28 * bars.length + 50,
      x: { label: "GiB/s", grid: true, ticks: width < 500 ? 3 : 6 },
      y: { label: null, domain: bars.map((b) => b.label) }, color: scale,
      marks: [
        Plot.barX(bars, { x: "rate", y: "label", fill: "way", fillOpacity: (d) => (d.way === "copy" ? 0.5 : 1) }),
        Plot.text(bars, { x: "rate", y: "label", text: (d) => d.rate.toFixed(2), textAnchor: "start", dx: 4, fill: "currentColor" }),
      ],
    })));
    const rates = data.throughput.map((d) => ({ ...d, rate: d.bytes_per_second / GIB }));
    const used = WAYS.filter((w) => rates.some((d) => d.way === w));
    put("plot-throughput", "Throughput over time", rates.length && ((width) => ({
      height: 220, x: { label: "seconds", ticks: width < 500 ? 3 : 8 }, y: { label: "GiB/s", grid: true },
      color: { ...reduced(used), legend: true },
      marks: [Plot.areaY(rates, { x: "seconds", y: "rate", fill: "way", curve: "step" }), Plot.ruleY([0])],
    })));
    const late = data.latencies.buckets;
    put("plot-latency", "Transfers by latency", late.length && ((width) => ({
      height: 200, x: { type: "log", label: "microseconds", ticks: width < 500 ? 3 : 8 }, y: { label: "transfers", grid: true },
      marks: [Plot.rectY(late, { x1: (d) => Math.max(0.5, d.from_us), x2: (d) => Math.max(1, d.to_us), y: "count", fill: "var(--fastpath)", title: (d) => `${d.count} of ${d.from_us} to ${d.to_us} us` }), Plot.ruleY([0])],
    })));
    put("plot-size", "Transfers by size", data.sizes.length && ((width) => ({
      height: 220, marginBottom: 60, x: { label: "KiB", domain: data.sizes.map((d) => d.label), tickRotate: -40 }, y: { label: "transfers", grid: true },
      marks: [Plot.barY(data.sizes, { x: "label", y: "count", fill: "var(--fastpath)", title: (d) => `${d.count}` }), Plot.ruleY([0])],
    })));
    timeline();
  }

  const l = data.latencies;
  const us = (s) => `${(s * 1e6).toFixed(0)} us`;
  $("quantiles").textContent = `half of the transfers end within ${us(l.p50)}, 90 % within ${us(l.p90)}, 99 % within ${us(l.p99)}`;
  $("slowest").replaceChildren(...data.slowest.map((s) => {
    const details = document.createElement("details"), summary = document.createElement("summary");
    summary.textContent = `${(s.to_ms - s.from_ms).toFixed(3)} ms  ${s.name} of ${bytes(s.args.nbytes || 0)}, ${s.args.error ? "failed" : s.args.backend || ""}, ${s.args.filename || ""}`;
    details.append(summary, rows(facts(s)));
    return details;
  }));
  draw();
  let width = document.body.clientWidth;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; draw(); }
  }).observe(document.body);
  document.documentElement.dataset.ready = "yes";
})();
