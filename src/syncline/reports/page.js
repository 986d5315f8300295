// Draws what drawing.py describes: for each rank a row of actions, collectives under way, the life of buckets, and the
// bytes of gradients. Drag to look closer, double-click to see all, point at something to read what it is.
"use strict";
(() => {
  const LABEL = 128, ACTIONS = 26, INSIDE = 7, UNDER_WAY = 7, LIFE = 4, MOST_LIVES = 24, MEMORY = 30, GAP = 16, AXIS = 24;
  const { kinds, drawings } = JSON.parse(document.getElementById("drawings").textContent);
  const tip = document.getElementById("tip");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colourOf = kinds.map((kind) => kind.replace(/[^a-z]+/g, "-"));
  const views = drawings.map((drawing, index) => makeView(drawing, document.getElementById(`drawing-${index}`)));

  function makeView(drawing, figure) {
    const view = { drawing, canvas: figure.querySelector("canvas"), from: 0, to: drawing.length || 1, drag: null };
    let top = AXIS;
    view.rows = drawing.rows.map((row) => {
      // Lives of one bucket share a line; of more buckets than fit, lines share pixels.
      const names = [...new Set(row.lives.map(([name]) => name))];
      const shown = Math.min(names.length, MOST_LIVES);
      const lineOf = new Map(names.map((name, place) => [name, Math.floor(place * shown / Math.max(1, names.length))]));
      const place = { row, top, lineOf, inside: top + ACTIONS, underWay: top + ACTIONS + INSIDE };
      place.lives = place.underWay + UNDER_WAY + 2;
      place.memory = place.lives + shown * LIFE + 3;
      place.most = Math.max(1, ...row.memory.map(([, bytes]) => bytes));
      place.bottom = place.memory + MEMORY;
      top = place.bottom + GAP;
      return place;
    });
    view.height = top;
    view.canvas.style.height = `${top}px`;
    figure.querySelector("button").addEventListener("click", () => show(view, 0, drawing.length || 1));
    view.canvas.addEventListener("dblclick", () => show(view, 0, drawing.length || 1));
    view.canvas.addEventListener("mousedown", (event) => { view.drag = { from: event.offsetX, to: event.offsetX }; });
    view.canvas.addEventListener("mousemove", (event) => moved(view, event));
    view.canvas.addEventListener("mouseleave", () => { tip.hidden = true; view.drag = null; draw(view); });
    view.canvas.addEventListener("mouseup", () => dropped(view));
    return view;
  }

  const scale = (view) => (view.canvas.clientWidth - LABEL - 12) / (view.to - view.from);
  const xOf = (view, time) => LABEL + (time - view.from) * scale(view);
  const timeAt = (view, x) => view.from + (x - LABEL) / scale(view);

  function show(view, from, to) {
    view.from = from;
    view.to = to;
    draw(view);
  }

  function dropped(view) {
    const drag = view.drag;
    view.drag = null;
    if (!drag || Math.abs(drag.to - drag.from) < 6) return draw(view);
    const length = view.drawing.length;
    const [left, right] = [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)]
      .map((x) => Math.min(Math.max(timeAt(view, x), 0), length));
    if (right - left < length * 1e-6) return draw(view);  // Closer than numbers are apart, or beside the drawing.
    show(view, left, right);
  }

  function moved(view, event) {
    if (view.drag) {
      view.drag.to = event.offsetX;
      draw(view);
    }
    const text = describe(view, event.offsetX, event.offsetY);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)}px`;
  }

  function describe(view, x, y) {
    const place = view.rows.find((each) => y >= each.top && y < each.bottom);
    if (!place || x < LABEL) return "";
    const time = timeAt(view, x), near = 3 / scale(view), row = place.row;
    const words = (begin, end) => end > begin ? `${timeText(view, begin)} to ${timeText(view, end)}, ${timeText(view, end - begin)} long` : `at ${timeText(view, begin)}`;
    if (y < place.underWay) {
      const depth = y < place.inside ? 0 : 1;
      const hits = row.spans.filter((span) => span[4] === depth && time >= span[1] - near && time <= span[2] + near);
      const within = hits.filter((span) => time >= span[1] && time <= span[2] && span[2] > span[1]);
      const found = within.length ? within : hits;
      return found.slice(0, 6).map(([, begin, end, text]) => `${text}\n${words(begin, end)}`).join("\n")
        + (found.length > 6 ? `\nand ${found.length - 6} more` : "");
    }
    if (y < place.lives) {
      return row.under_way.filter(([begin, end]) => time >= begin - near && time <= end + near)
        .map(([begin, end, text]) => `${text}: under way\n${words(begin, end)}`).join("\n");
    }
    if (y < place.memory - 2) {
      const line = Math.floor((y - place.lives) / LIFE);
      return row.lives.filter(([name, , begin, end]) => place.lineOf.get(name) === line && time >= begin && time <= end)
        .map(([name, bytes, begin, end]) => `${name}: ${bytesText(bytes)} of gradients\n${words(begin, end)}`).join("\n");
    }
    const held = row.memory.filter(([since]) => since <= time).pop();
    return held ? `${bytesText(held[1])} of gradients at ${timeText(view, time)}, at most ${bytesText(place.most)}` : "";
  }

  function timeText(view, time) {
    if (view.drawing.unit !== "s") return `${+time.toFixed(2)} ${view.drawing.unit}`;
    return time < 0.001 && time > 0 ? `${(time * 1e6).toFixed(0)} µs` : time < 1 ? `${(time * 1e3).toFixed(time < 0.1 ? 2 : 1)} ms` : `${time.toFixed(3)} s`;
  }

  function bytesText(bytes) {
    const steps = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = 0;
    while (bytes >= 1024 && step < steps.length - 1) { bytes /= 1024; step += 1; }
    return `${step ? bytes.toFixed(1) : bytes} ${steps[step]}`;
  }

  function draw(view) {
    const { canvas, rows } = view, ratio = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = view.height * ratio;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    drawAxis(view, context);
    for (const place of rows) drawRow(view, context, place);
    if (view.drag) {
      context.globalAlpha = 0.15;
      context.fillStyle = colour("accent");
      context.fillRect(Math.min(view.drag.from, view.drag.to), 0, Math.abs(view.drag.to - view.drag.from), view.height);
      context.globalAlpha = 1;
    }
  }

  function drawAxis(view, context) {
    const span = view.to - view.from, raw = span / 8, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= raw);
    context.textAlign = "center";
    for (let time = Math.ceil(view.from / step) * step; time <= view.to + step * 1e-6; time += step) {
      const x = xOf(view, time);
      context.fillStyle = colour("line");
      context.fillRect(x, AXIS - 4, 1, view.height - AXIS);
      context.fillStyle = colour("quiet");
      context.fillText(view.drawing.unit === "s" ? timeText(view, time) : `${+time.toFixed(3)}`, x, AXIS / 2);
    }
  }

  function drawRow(view, context, place) {
    const { row } = place, right = view.canvas.clientWidth - 12;
    context.textAlign = "left";
    context.fillStyle = colour("text");
    const [first, ...rest] = row.title.split(", ");
    context.fillText(first, 12, place.top + 8);
    context.fillStyle = colour("quiet");
    context.fillText(rest.join(", "), 12, place.top + 23, LABEL - 20);
    context.fillText(bytesText(place.most), 12, place.memory + MEMORY - 8, LABEL - 20);
    context.save();
    context.beginPath();
    context.rect(LABEL, 0, right - LABEL + 1, view.height);
    context.clip();
    const bar = (begin, end, top, height, fill) => {
      const from = xOf(view, begin), width = Math.max(1, xOf(view, end) - from);
      if (from > right || from + width < LABEL) return null;
      context.fillStyle = fill;
      context.fillRect(from, top, width > 3 ? width - 0.6 : width, height);
      return { from: Math.max(from, LABEL), width: Math.min(from + width, right) - Math.max(from, LABEL) };
    };
    const fills = colourOf.map(colour);
    for (const deep of [0, 1]) {
      for (const [kind, begin, end, text, depth] of row.spans) {
        if (depth !== deep) continue;
        const drawn = deep ? bar(begin, end, place.inside + 1, INSIDE - 1, fills[kind]) : bar(begin, end, place.top, ACTIONS - 1, fills[kind]);
        const micro = !deep && drawn && drawn.width > 14 && /^(forward|backward)/.test(kinds[kind]) && text.match(/\d+/);
        if (micro) {
          context.fillStyle = "#ffffff";
          context.textAlign = "center";
          context.fillText(micro[0], drawn.from + drawn.width / 2, place.top + ACTIONS / 2, drawn.width);
        }
      }
    }
    for (const [begin, end] of row.under_way) bar(begin, end, place.underWay + 1, UNDER_WAY - 2, colour("reduction"));
    context.globalAlpha = 0.65;
    for (const [name, , begin, end] of row.lives) bar(begin, end, place.lives + place.lineOf.get(name) * LIFE, LIFE - 1, colour("memory"));
    context.globalAlpha = 1;
    const bottom = place.memory + MEMORY;
    context.beginPath();
    context.moveTo(xOf(view, 0), bottom);
    let level = 0;
    for (const [time, bytes] of row.memory) {
      context.lineTo(xOf(view, time), bottom - level);
      level = (MEMORY - 4) * bytes / place.most;
      context.lineTo(xOf(view, time), bottom - level);
    }
    context.lineTo(xOf(view, view.drawing.length), bottom - level);
    context.lineTo(xOf(view, view.drawing.length), bottom);
    context.globalAlpha = 0.18;
    context.fillStyle = colour("memory");
    context.fill();
    context.globalAlpha = 1;
    context.strokeStyle = colour("memory");
    context.lineWidth = 1;
    context.stroke();
    context.restore();
  }

  const redraw = () => views.forEach(draw);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
})();
