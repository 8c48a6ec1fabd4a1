"use strict";
// Timelines of traces on one axis: wheel zooms, drag pans, hover and N / P show an op.
// Data: {colours: {kind: [label, colour]}, traces: [{title, group, lines, length, lanes: [{device, queue, height, rows}]}]};
// a row is a list of [kind, text, start, end, op], times in ms from the step's start.
(() => {
  const data = JSON.parse(document.getElementById("traces").textContent);
  const root = document.getElementById("timeline");
  const canvas = root.querySelector("canvas");
  const tip = root.querySelector(".tip");
  const choices = root.querySelector(".choices");
  const pen = canvas.getContext("2d");
  const TITLE = 20, AXIS = 24, GAP = 16, DEVICE_GAP = 6, LANE_GAP = 2;
  const view = { start: 0, end: 1 };
  let shown = [], rows = [], marked = null, left = 120, width = 800;

  const longest = () => Math.max(...shown.map((trace) => trace.length), 1e-6);
  const x = (ms) => left + ((ms - view.start) / (view.end - view.start)) * (width - left);
  const ms = (px) => view.start + ((px - left) / (width - left)) * (view.end - view.start);
  const fill = (kind) => kind === "step" ? css("--optimizer") : data.colours[kind][1];
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function duration(value) {
    return value >= 1000 ? `${(value / 1000).toFixed(3)} s` : value >= 1 ? `${value.toFixed(2)} ms` : `${(value * 1000).toFixed(1)} us`;
  }

  function look(start, end) {
    const whole = longest(), span = Math.min(Math.max(end - start, whole * 1e-5), whole);
    view.start = Math.min(Math.max(start, 0), whole - span);
    view.end = view.start + span;
    draw();
  }

  function zoom(factor, at) {
    const span = (view.end - view.start) * factor;
    const share = (at - view.start) / (view.end - view.start);
    look(at - share * span, at + (1 - share) * span);
  }

  function layOut() {
    rows = [];
    let top = 4;
    for (const trace of shown) {
      trace.top = top;
      top += TITLE * trace.lines.length;
      trace.lanes.forEach((lane, number) => {
        if (number) top += lane.device === trace.lanes[number - 1].device ? LANE_GAP : DEVICE_GAP;
        lane.top = top;
        for (const boxes of lane.rows) {
          rows.push({ trace, lane, boxes, top, height: lane.height });
          top += lane.height;
        }
      });
      trace.bottom = top;
      top += GAP;
    }
    return top + AXIS;
  }

  function draw() {
    const height = layOut(), scale = window.devicePixelRatio || 1;
    width = root.clientWidth;
    left = width < 600 ? 84 : 130;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.textBaseline = "middle";
    shown.forEach(drawNames);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, width - left, height);
    pen.clip();
    drawAxis(height);
    rows.forEach(drawRow);
    pen.restore();
    canvas.dataset.start = view.start;
    canvas.dataset.end = view.end;
    canvas.dataset.boxes = rows.reduce((sum, row) => sum + row.boxes.length, 0);
  }

  function drawNames(trace) {
    pen.textAlign = "left";
    trace.lines.forEach((line, number) => {
      const last = number === trace.lines.length - 1;
      pen.font = last ? "12px system-ui, sans-serif" : "600 13px system-ui, sans-serif";
      pen.fillStyle = css(last ? "--quiet" : "--ink");
      pen.fillText(line, 0, trace.top + TITLE * (number + 0.5), width);
    });
    for (const lane of trace.lanes) {
      const high = lane.height * lane.rows.length;
      pen.fillStyle = css("--ground");
      pen.fillRect(left, lane.top, width - left, high);
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = css("--ink");
      pen.textAlign = "right";
      pen.fillText(width < 600 ? `${lane.device} ${lane.queue}` : `device ${lane.device} ${lane.queue}`, left - 6, lane.top + high / 2, left - 6);
    }
  }

  // Between the lanes, so that no line runs through a title.
  function drawAxis(height) {
    const step = tick((view.end - view.start) / Math.max(2, (width - left) / 110));
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (let at = Math.ceil(view.start / step) * step; at <= view.end; at += step) {
      pen.fillStyle = css("--line");
      shown.forEach((trace) => pen.fillRect(x(at), trace.lanes[0].top, 1, trace.bottom - trace.lanes[0].top));
      pen.fillStyle = css("--quiet");
      pen.fillText(`${+at.toPrecision(6)} ms`, Math.min(Math.max(x(at), left + 20), width - 26), height - AXIS / 2);
    }
  }

  function tick(least) {
    const power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least);
  }

  function drawRow(row) {
    for (const box of row.boxes) {
      const [kind, text, start, end] = box;
      if (end < view.start || start > view.end) continue;
      const from = x(start), wide = Math.max(x(end) - from, 1);
      pen.fillStyle = fill(kind);
      pen.fillRect(from, row.top + 1, wide > 3 ? wide - 0.6 : wide, row.height - 2);
      if (box === marked) {
        pen.strokeStyle = css("--ink");
        pen.lineWidth = 2;
        pen.strokeRect(from + 1, row.top + 2, Math.max(wide - 2, 1), row.height - 4);
      }
      if (text && wide > 7 * text.length + 4 && row.height >= 14) {
        pen.font = "11px system-ui, sans-serif";
        pen.textAlign = "center";
        pen.fillStyle = data.colours[kind][2];
        pen.fillText(text, from + wide / 2, row.top + row.height / 2);
      }
    }
  }

  function find(px, py) {
    const row = rows.find((one) => py >= one.top && py < one.top + one.height);
    if (!row || px < left) return null;
    const at = ms(px), near = ms(px + 2) - at;
    const box = row.boxes.find(([, , start, end]) => at >= start - near && at <= end + near);
    return box ? { row, box } : null;
  }

  function mark(found) {
    marked = found && found.box;
    tip.hidden = !found;
    if (found) {
      const { row, box } = found, [kind, , start, end, op] = box;
      tip.textContent = `${op}  ${data.colours[kind][0]}, device ${row.lane.device} ${row.lane.queue}, from ${duration(start)} for ${duration(end - start)}`;
      const at = Math.min(Math.max(x((Math.max(start, view.start) + Math.min(end, view.end)) / 2), left), width);
      tip.style.left = `${Math.max(0, Math.min(at - 20, width - tip.offsetWidth))}px`;
      tip.style.top = `${canvas.offsetTop + row.top + row.height + 4}px`;
    }
    draw();
  }

  function neighbour(step) {
    const all = rows.flatMap((row) => row.boxes.map((box) => ({ row, box })));
    const number = all.findIndex((one) => one.box === marked) + step;
    const found = all[Math.min(Math.max(number, 0), all.length - 1)];
    if (!found) return;
    const { box } = found;
    if (box[3] < view.start || box[2] > view.end) {
      const half = (view.end - view.start) / 2, middle = (box[2] + box[3]) / 2;
      look(middle - half, middle + half);
    }
    mark(found);
  }

  const pan = (share) => look(view.start + share * (view.end - view.start), view.end + share * (view.end - view.start));
  const middle = () => (view.start + view.end) / 2;
  const reset = () => look(0, longest());
  const acts = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => zoom(0.7, middle()), ArrowDown: () => zoom(1.4, middle()),
    "+": () => zoom(0.7, middle()), "-": () => zoom(1.4, middle()), Home: reset, n: () => neighbour(1), p: () => neighbour(-1),
    Escape: () => mark(null),
  };

  canvas.addEventListener("keydown", (event) => {
    const act = !event.ctrlKey && !event.metaKey && !event.altKey && acts[event.key];
    if (act) { act(); event.preventDefault(); }
  });
  canvas.addEventListener("wheel", (event) => {
    zoom(1.0015 ** event.deltaY, ms(Math.max(event.offsetX, left)));
    event.preventDefault();
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = { x: event.offsetX, start: view.start, end: view.end }; });
  window.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return mark(find(event.offsetX, event.offsetY));
    const by = ((held.x - event.offsetX) / (width - left)) * (held.end - held.start);
    look(held.start + by, held.end + by);
  });
  canvas.addEventListener("pointerleave", () => mark(null));
  canvas.addEventListener("dblclick", reset);
  root.querySelectorAll("[data-act]").forEach((button) => button.addEventListener("click", acts[button.dataset.act]));
  choices.addEventListener("change", choose);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", draw);

  function choose() {
    const on = [...choices.querySelectorAll("input:checked")].map((box) => Number(box.value));
    shown = on.map((number) => data.traces[number]);
    marked = null;
    tip.hidden = true;
    reset();
  }
  choose();
})();
