// Part of eclip, Apache-2.0, as the whole page; no script of others is in it.
// Draws what the page only carries packed: recorded kernels, and what a smaller lane costs each of
// them. Everything else stands in the page already.
(() => {
  "use strict";
  const GAP_TICKS = 200; // a worker that stands still for 20 µs at a joint has yielded
  const HEAT_CAP = 8; // times the busy time on the whole device; beyond, the colour stays
  const BAND_PX = 54, TITLE_PX = 18, AXIS_PX = 22, SLICE_PX = 5;

  const paint = {}; // the page's colours, which change with its scheme
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  async function unpack(script) {
    const bytes = Uint8Array.from(atob(script.textContent), (sign) => sign.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(plain).json();
  }

  function prepare(canvas, height) {
    const width = canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    return [pen, width];
  }

  function sums(differences) {
    let total = 0;
    return differences.map((difference) => (total += difference));
  }

  // The first index whose value is at least the wanted one.
  function search(values, wanted) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }

  function stripes(pen) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const mark = tile.getContext("2d");
    mark.strokeStyle = colour("--shade");
    mark.lineWidth = 1.5;
    mark.beginPath();
    mark.moveTo(0, 6); mark.lineTo(6, 0);
    mark.stroke();
    return pen.createPattern(tile, "repeat");
  }

  // --- what a smaller lane costs

  const costs = new Map(); // by model: a promise of its profile
  for (const box of document.querySelectorAll(".cost")) {
    const load = () => {
      if (!costs.has(box.dataset.model)) {
        costs.set(box.dataset.model, unpack(box.querySelector("script")));
      }
      return costs.get(box.dataset.model);
    };
    box.load = load;
    let chosen = -1;
    const canvas = box.querySelector("canvas"), view = box.querySelector(".view");
    const readout = box.querySelector(".readout");

    async function draw() {
      const data = await load();
      const rows = data.sizes.length, row = Math.max(8, Math.min(16, 220 / rows));
      const [pen, width] = prepare(canvas, rows * row + AXIS_PX);
      const step = (width - 60) / data.names.length;
      data.times.forEach((times, kernel) => times.forEach((time, size) => {
        const heat = Math.log(Math.max(time / 100, 1)) / Math.log(HEAT_CAP);
        pen.globalAlpha = 1;
        pen.fillStyle = paint.wash;
        pen.fillRect(60 + kernel * step, (rows - 1 - size) * row, step + 0.5, row);
        pen.globalAlpha = Math.min(heat, 1);
        pen.fillStyle = paint.heat;
        pen.fillRect(60 + kernel * step, (rows - 1 - size) * row, step + 0.5, row);
      }));
      pen.globalAlpha = 1;
      pen.fillStyle = paint.soft;
      pen.textAlign = "right";
      const every = Math.ceil(16 / row);
      data.sizes.forEach((size, index) => {
        if ((rows - 1 - index) % every === 0) {
          pen.fillText(size + " " + box.dataset.unit, 54, (rows - 1 - index) * row + row / 2 + 4);
        }
      });
      pen.fillText("kernels in launch order →", width - 4, rows * row + 15);
      if (chosen >= 0) {
        pen.strokeStyle = paint.ink;
        pen.lineWidth = 2;
        pen.strokeRect(60 + chosen * step - 1, 1, Math.max(step, 3) + 2, rows * row - 2);
      }
    }

    async function choose(kernel) {
      const data = await load();
      chosen = Math.min(Math.max(kernel, 0), data.names.length - 1);
      const slower = data.sizes.slice(0, -1).map((size, index) => {
        return size + " " + box.dataset.unit + "s " + (data.times[chosen][index] / 100).toFixed(2) + "×";
      });
      readout.textContent = "Kernel " + chosen + ": " + data.names[chosen] + ". Whole device " +
        (data.whole[chosen] / 1000).toFixed(1) + " µs; " + slower.join(", ") + ".";
      draw();
    }

    canvas.addEventListener("pointermove", async (event) => {
      const data = await load();
      const step = (canvas.clientWidth - 60) / data.names.length;
      if (event.offsetX >= 60) choose(Math.floor((event.offsetX - 60) / step));
    });
    view.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      choose(chosen + step);
    });
    box.redraw = () => { if (box.open) draw(); };
    box.addEventListener("toggle", box.redraw);
  }

  async function kernelName(model, position) {
    const box = [...document.querySelectorAll(".cost")].find((one) => one.dataset.model === model);
    return box ? (await box.load()).names[position] : "";
  }

  // --- the timeline, and the occupancy below it; both show the same time

  class Lanes {
    constructor(box) {
      this.box = box;
      this.view = box.querySelector(".view");
      this.readout = box.querySelector(".readout");
      this.data = null;
      this.chosen = null; // [worker, index]
      box.querySelectorAll("[data-do]").forEach((button) => {
        button.addEventListener("click", () => this.act(button.dataset.do));
      });
      this.listen();
    }

    async load() {
      const data = await unpack(this.box.querySelector("script"));
      for (const worker of data.workers) {
        worker.start = sums(worker.start);
        worker.at = sums(worker.at);
        worker.longest = worker.long.reduce((most, long) => Math.max(most, long), 0);
        worker.joints = new Set(worker.joints);
        worker.aside = new Set(worker.aside);
      }
      this.data = data;
      this.from = 0;
      this.to = data.window;
    }

    async show() {
      this.loading ??= this.load();
      await this.loading;
      this.draw();
      this.box.classList.add("drawn");
    }

    act(what) {
      if (!this.data) return;
      const span = this.to - this.from;
      if (what === "left") this.pan(-span / 4);
      if (what === "right") this.pan(span / 4);
      if (what === "in") this.zoom(0.5, (this.from + this.to) / 2);
      if (what === "out") this.zoom(2, (this.from + this.to) / 2);
      if (what === "all") { this.from = 0; this.to = this.data.window; this.draw(); }
      if (what === "next") this.step(1);
      if (what === "before") this.step(-1);
      if (what === "above") this.change(-1);
      if (what === "below") this.change(1);
    }

    pan(by) {
      const span = this.to - this.from;
      this.from = Math.min(Math.max(this.from + by, 0), this.data.window - span);
      this.to = this.from + span;
      this.draw();
    }

    zoom(factor, around) {
      const span = Math.min(Math.max((this.to - this.from) * factor, 20), this.data.window);
      const part = (around - this.from) / (this.to - this.from);
      this.from = Math.min(Math.max(around - part * span, 0), this.data.window - span);
      this.to = this.from + span;
      this.draw();
    }

    step(by) {
      const [worker, index] = this.chosen || [0, -1];
      const records = this.data.workers[worker];
      if (!records.start.length) { this.chosen = [worker, -1]; return; }
      let next = index + by;
      if (index < 0) next = search(records.start, this.from);
      this.choose(worker, Math.min(Math.max(next, 0), records.start.length - 1));
    }

    change(by) {
      const count = this.data.workers.length;
      const worker = ((this.chosen ? this.chosen[0] : -by) + by + count) % count;
      const records = this.data.workers[worker];
      const now = this.chosen && this.chosen[1] >= 0
        ? this.data.workers[this.chosen[0]].start[this.chosen[1]] : this.from;
      this.choose(worker, Math.min(search(records.start, now), records.start.length - 1));
    }

    async choose(worker, index) {
      this.chosen = [worker, index];
      if (index < 0) return;
      const records = this.data.workers[worker], start = records.start[index];
      const end = start + records.long[index];
      if (start < this.from || end > this.to) {
        const span = Math.max(this.to - this.from, 2 * records.long[index]);
        this.from = Math.min(Math.max(start - span / 2, 0), Math.max(this.data.window - span, 0));
        this.to = Math.min(this.from + span, this.data.window);
      }
      this.draw();
      const scale = this.data.tick_ns / 1000, position = records.at[index];
      const name = await kernelName(records.model, position);
      const lane = records.lane[index];
      const parts = [
        records.name + ", kernel " + position + (name ? ": " + name : ""),
        (records.long[index] * scale).toFixed(1) + " µs from " + (start * scale / 1000).toFixed(4) + " ms",
        this.data.lanes[lane].title,
      ];
      if (records.aside.has(lane)) parts.push("moved aside");
      if (records.joints.has(position)) parts.push("at a joint" + (this.paused(records, index) ? ", after a pause" : ""));
      this.readout.textContent = parts.join(" · ");
    }

    paused(records, index) {
      if (!index || !records.joints.has(records.at[index])) return 0;
      if (records.at[index - 1] !== records.at[index] - 1) return 0;
      const gap = records.start[index] - records.start[index - 1] - records.long[index - 1];
      return gap >= GAP_TICKS ? gap : 0;
    }

    draw() {
      this.drawTimeline();
      this.drawOccupancy();
    }

    ticks(pen, width, y) {
      const scale = this.data.tick_ns / 1e6, span = (this.to - this.from) * scale;
      const rough = span / Math.max(width / 72, 2), size = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= rough);
      const digits = Math.max(0, -Math.floor(Math.log10(step)));
      pen.fillStyle = paint.soft;
      pen.strokeStyle = paint.line;
      pen.textAlign = "center";
      for (let time = Math.ceil(this.from * scale / step) * step; time <= this.to * scale; time += step) {
        const x = (time / scale - this.from) / (this.to - this.from) * width;
        pen.beginPath(); pen.moveTo(x, 0); pen.lineTo(x, y); pen.stroke();
        if (x > 20 && x < width - 30) pen.fillText(time.toFixed(digits) + " ms", x, y + 15);
      }
    }

    drawTimeline() {
      const { workers, slices, lanes } = this.data;
      const height = workers.length * (BAND_PX + TITLE_PX);
      const [pen, width] = prepare(this.view.querySelector(".timeline"), height + AXIS_PX);
      const scale = width / (this.to - this.from), row = BAND_PX / slices;
      const pause = stripes(pen);
      workers.forEach((records, worker) => {
        const top = worker * (BAND_PX + TITLE_PX) + TITLE_PX;
        pen.fillStyle = paint.wash;
        pen.fillRect(0, top, width, BAND_PX);
      });
      this.ticks(pen, width, height);
      workers.forEach((records, worker) => {
        const top = worker * (BAND_PX + TITLE_PX) + TITLE_PX, own = colour("--w" + worker);
        const first = Math.max(search(records.start, this.from - records.longest) - 1, 0);
        for (let index = first; index < records.start.length && records.start[index] < this.to; index++) {
          const x = (records.start[index] - this.from) * scale;
          const wide = Math.max(records.long[index] * scale, 0.6);
          const gap = this.paused(records, index) * scale;
          if (gap) { pen.globalAlpha = 1; pen.fillStyle = pause; pen.fillRect(x - gap, top, gap, BAND_PX); }
          if (x + wide < 0) continue;
          pen.fillStyle = own;
          pen.globalAlpha = records.at[index] % 2 ? 0.62 : 1;
          for (const [slice, count] of lanes[records.lane[index]].runs) {
            pen.fillRect(x, top + slice * row, wide, count * row);
          }
          pen.globalAlpha = 1;
          pen.fillStyle = paint.ink;
          if (records.aside.has(records.lane[index])) pen.fillRect(x, top + BAND_PX - 3, wide, 3);
          if (records.joints.has(records.at[index]) && records.long[index] * scale > 2) pen.fillRect(x, top - 4, 1.5, 4);
        }
        pen.globalAlpha = 1;
        pen.fillStyle = paint.ink;
        pen.textAlign = "left";
        pen.fillText(records.name, 2, top - 5);
        if (this.chosen && this.chosen[0] === worker && this.chosen[1] >= 0) {
          const x = (records.start[this.chosen[1]] - this.from) * scale;
          pen.strokeStyle = paint.ink;
          pen.lineWidth = 2;
          pen.strokeRect(x - 1, top - 1, Math.max(records.long[this.chosen[1]] * scale, 2) + 2, BAND_PX + 2);
          pen.lineWidth = 1;
        }
      });
    }

    // Kernels at once on every slice, averaged over each bin.
    drawOccupancy() {
      const { workers, slices, lanes } = this.data, row = Math.max(SLICE_PX, 70 / slices);
      const [pen, width] = prepare(this.view.querySelector(".occupancy"), slices * row + AXIS_PX);
      const bins = Math.max(Math.floor(width / 2), 1), size = (this.to - this.from) / bins;
      const table = Array.from({ length: slices }, () => new Float32Array(bins + 1));
      for (const records of workers) {
        const first = Math.max(search(records.start, this.from - records.longest) - 1, 0);
        for (let index = first; index < records.start.length && records.start[index] < this.to; index++) {
          const begin = Math.max((records.start[index] - this.from) / size, 0);
          const end = Math.min((records.start[index] + records.long[index] - this.from) / size, bins);
          if (end <= begin) continue;
          for (const [slice, count] of lanes[records.lane[index]].runs) {
            for (let part = slice; part < slice + count; part++) {
              for (let bin = Math.floor(begin); bin < end; bin++) {
                table[part][bin] += Math.min(end, bin + 1) - Math.max(begin, bin);
              }
            }
          }
        }
      }
      pen.fillStyle = paint.wash;
      pen.fillRect(0, 0, width, slices * row);
      this.ticks(pen, width, slices * row);
      pen.fillStyle = paint.heat;
      table.forEach((values, slice) => {
        for (let bin = 0; bin < bins; bin++) {
          if (values[bin] < 0.02) continue;
          pen.globalAlpha = values[bin] <= 1 ? 0.45 * values[bin] : Math.min(0.45 + 0.55 * (values[bin] - 1), 1);
          pen.fillRect(bin * width / bins, slice * row, width / bins + 0.3, row);
        }
      });
    }

    listen() {
      const canvas = this.view.querySelector(".timeline"), touches = new Map();
      const timeAt = (event) => this.from + event.offsetX / canvas.clientWidth * (this.to - this.from);
      for (const one of this.view.querySelectorAll("canvas")) {
        one.addEventListener("pointerdown", (event) => {
          one.setPointerCapture(event.pointerId);
          touches.set(event.pointerId, event.offsetX);
        });
        const end = (event) => touches.delete(event.pointerId);
        one.addEventListener("pointerup", end);
        one.addEventListener("pointercancel", end);
        one.addEventListener("pointermove", (event) => {
          if (!this.data) return;
          const before = touches.get(event.pointerId), span = this.to - this.from;
          if (before === undefined) { if (one === canvas) this.hover(event, timeAt(event)); return; }
          if (touches.size === 2) {
            const other = [...touches].find(([id]) => id !== event.pointerId)[1];
            const factor = Math.abs(before - other) / Math.max(Math.abs(event.offsetX - other), 8);
            touches.set(event.pointerId, event.offsetX);
            this.zoom(factor, this.from + other / one.clientWidth * span);
          } else {
            touches.set(event.pointerId, event.offsetX);
            this.pan((before - event.offsetX) / one.clientWidth * span);
          }
        });
        one.addEventListener("wheel", (event) => {
          if (!this.data || !(event.ctrlKey || event.metaKey || event.shiftKey)) return;
          event.preventDefault();
          this.zoom(event.deltaY + event.deltaX > 0 ? 1.3 : 1 / 1.3, timeAt(event));
        }, { passive: false });
        one.addEventListener("dblclick", () => this.act("all"));
      }
      const keys = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "above", ArrowDown: "below",
        "+": "in", "=": "in", "-": "out", "0": "all", ".": "next", ",": "before" };
      this.view.addEventListener("keydown", (event) => {
        if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        this.act(keys[event.key]);
      });
    }

    hover(event, time) {
      const worker = Math.floor(event.offsetY / (BAND_PX + TITLE_PX));
      if (worker >= this.data.workers.length) return;
      const records = this.data.workers[worker];
      const index = search(records.start, time + 1) - 1;
      const close = (this.to - this.from) / 300;
      if (index >= 0 && time <= records.start[index] + records.long[index] + close) this.choose(worker, index);
    }
  }

  const views = new Map([...document.querySelectorAll(".lanes")].map((box) => [box, new Lanes(box)]));

  // --- tabs

  const lists = [...document.querySelectorAll("[role=tablist]")];
  const panelOf = (tab) => document.getElementById(tab.getAttribute("aria-controls"));
  const fragment = (tab) => "#plan=" + encodeURIComponent(tab.dataset.link);
  function choose(chosen) {
    for (const tab of chosen.parentElement.children) {
      tab.setAttribute("aria-selected", String(tab === chosen));
      tab.tabIndex = tab === chosen ? 0 : -1;
      panelOf(tab).hidden = tab !== chosen;
    }
    panelOf(chosen).querySelectorAll(".lanes").forEach((box) => seen.observe(box));
  }
  function pick(tab) {
    choose(tab);
    history.replaceState(null, "", fragment(tab));
  }
  function follow() {
    const tab = [...document.querySelectorAll("[role=tab]")].find((one) => fragment(one) === location.hash);
    if (!tab) return;
    choose(tab);
    tab.scrollIntoView();
  }

  // A timeline is unpacked when it comes near the window, or some time after everything else: who
  // prints may not have scrolled.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      views.get(entry.target).show();
    }
  }, { rootMargin: "400px" });

  function takeColours() {
    for (const name of ["ink", "soft", "wash", "line", "heat"]) paint[name] = colour("--" + name);
  }
  function redraw() {
    takeColours();
    for (const view of views.values()) if (view.data && view.box.offsetParent) view.draw();
    document.querySelectorAll(".cost").forEach((box) => box.redraw());
  }

  takeColours();
  for (const list of lists) {
    const tabs = [...list.children];
    tabs.forEach((tab, index) => {
      tab.addEventListener("click", () => pick(tab));
      tab.addEventListener("keydown", (event) => {
        const goal = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (goal === undefined) return;
        event.preventDefault();
        const next = tabs[(goal + tabs.length) % tabs.length];
        pick(next);
        next.focus();
      });
    });
    choose(tabs.find((tab) => "first" in tab.dataset) || tabs[0]);
  }
  addEventListener("hashchange", follow);
  follow();
  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width === document.documentElement.clientWidth) return;
    width = document.documentElement.clientWidth;
    redraw();
  });
  addEventListener("load", () => setTimeout(() => {
    for (const view of views.values()) if (!view.data && view.box.offsetParent) view.show();
  }, 2000));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  matchMedia("print").addEventListener("change", redraw);
})();
