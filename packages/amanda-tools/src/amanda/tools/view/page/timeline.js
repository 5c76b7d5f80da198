// Events on tracks, on a canvas; zoomed by the wheel, moved by dragging, an event is selected by a click.

const LANE = 18;
const AXIS = 22;
const TRACK = 18;
const PLOT = 46;
const GAP = 6;    // between tracks

class Timeline extends Chart {
  constructor(model, content, element, tools) {
    super(model, element, tools, endOf(content), 0.05);
    this.content = content;
    this.title = "Timeline";
    this.whole = "all of the time";
    this.events = content.events;
    this.size = this.events.start.length;
    this.byLane = this.lanes();
    this.colours = this.events.name.map((name, i) => kindOf(this.events.op[i] >= 0 ? model.ops.type[this.events.op[i]] : name.replace(/^aten::/, "")));
    this.top = 0;
  }

  // For each track and depth its events by their start; what lies in sight is found by halving.
  lanes() {
    const lanes = this.content.tracks.map((track) => Array.from({ length: track.depth }, () => []));
    for (let i = 0; i < this.size; i += 1) lanes[this.events.track[i]][this.events.depth[i]].push(i);
    return lanes;
  }

  parts() {
    const said = h("p", { class: "note", "aria-live": "polite" });
    if (this.content.dropped) said.textContent = `${plural(this.content.dropped, "shorter event")} not shown`;
    return [this.canvas, this.tip, said];
  }

  // The selected op's event comes into sight.
  follow() {
    const op = this.model.selectedOp;
    if (this.current < 0 || this.events.op[this.current] !== op) this.current = op < 0 ? -1 : this.events.op.indexOf(op);
    if (!this.shown) return;
    if (this.current >= 0) {
      const start = this.events.start[this.current];
      const end = start + this.events.duration[this.current];
      const span = this.to - this.from;
      if (end < this.from || start > this.to) this.look((start + end - span) / 2, (start + end + span) / 2);
      const top = this.topOf(this.current);
      this.top = clamp(this.top, top + AXIS + 2 * LANE - this.canvas.clientHeight, top);
    }
    this.draw();
  }

  // ---- drawing ----

  render() {
    if (!this.shown) return;
    const { canvas } = this;
    const [pen, wide, tall] = this.pen();
    this.boxes = [];
    let y = AXIS - this.top;
    for (const counter of this.content.counters) {
      this.plot(pen, counter, y, wide);
      y += PLOT;
    }
    this.content.tracks.forEach((track, index) => {
      pen.fillStyle = this.colour("soft");
      pen.fillText(track.name, 8, y + TRACK / 2);
      y += TRACK;
      this.byLane[index].forEach((lane) => {
        if (y > -LANE && y < tall) this.lane(pen, lane, y, wide);
        y += LANE;
      });
      y += GAP;
    });
    this.height = y + this.top;
    this.axis(pen, wide, tall);
    this.speak();
    canvas.dataset.from = this.from.toFixed(3);
    canvas.dataset.to = this.to.toFixed(3);
  }

  lane(pen, lane, y, wide) {
    const { start, duration: took, name, op } = this.events;
    const { matches, selectedOp } = this.model;
    let low = 0;
    for (let high = lane.length; low < high;) {
      const middle = (low + high) >> 1;
      if (start[lane[middle]] + took[lane[middle]] < this.from) low = middle + 1;
      else high = middle;
    }
    let painted = -1;
    for (let place = low; place < lane.length && start[lane[place]] <= this.to; place += 1) {
      const i = lane[place];
      const left = Math.max(-2, this.x(start[i]));
      const right = Math.min(wide + 2, this.x(start[i] + took[i]));
      const chosen = i === this.current || (selectedOp >= 0 && op[i] === selectedOp);
      if (right < painted + 0.5 && !chosen) continue;  // under a pixel that is painted
      const width = Math.max(right - left - 0.5, 0.75);
      pen.globalAlpha = matches && !(op[i] >= 0 && matches[op[i]]) ? 0.2 : 1;
      pen.fillStyle = this.colour(kindClass(this.colours[i]));
      pen.fillRect(left, y + 1, width, LANE - 2);
      if (chosen) {
        pen.globalAlpha = 1;
        pen.strokeStyle = this.colour("accent");
        pen.lineWidth = 2;
        pen.strokeRect(left, y + 1, Math.max(width, 2), LANE - 2);
      }
      if (width > 28) {
        pen.fillStyle = this.colour("on-kind");
        const visible = Math.max(left, 0);
        pen.fillText(fitted(pen, name[i], Math.min(right, wide) - visible - 8), visible + 4, y + LANE / 2 + 0.5);
      }
      this.boxes.push([left, y, left + Math.max(width, 3), y + LANE, i]);
      painted = right;
    }
    pen.globalAlpha = 1;
  }

  plot(pen, counter, y, wide) {
    const most = counter.points.reduce((found, [, value]) => Math.max(found, value), 0) || 1;
    const base = y + PLOT - 6;
    const high = (value) => base - (value / most) * (PLOT - 20);
    pen.fillStyle = this.colour("plot");
    pen.beginPath();
    pen.moveTo(0, base);
    let value = 0;
    for (const [at, next] of counter.points) {
      const x = clamp(this.x(at), 0, wide);
      pen.lineTo(x, high(value));
      pen.lineTo(x, high(next));
      value = next;
    }
    pen.lineTo(clamp(this.x(this.all), 0, wide), high(value));
    pen.lineTo(clamp(this.x(this.all), 0, wide), base);
    pen.fill();
    pen.fillStyle = this.colour("soft");
    pen.fillText(`${counter.name}, at most ${amount(most)}`, 8, y + 8);
  }

  axis(pen, wide, tall) {
    pen.fillStyle = this.colour("panel");
    pen.fillRect(0, 0, wide, AXIS);
    const rough = ((this.to - this.from) / Math.max(wide, 1)) * 110;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
    pen.strokeStyle = this.colour("line");
    pen.fillStyle = this.colour("soft");
    pen.lineWidth = 1;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.globalAlpha = 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS);
      pen.lineTo(x, tall);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.fillText(duration(Number((at * 1e-6).toPrecision(9))), x + 4, AXIS / 2);
    }
    pen.beginPath();
    pen.moveTo(0, AXIS - 0.5);
    pen.lineTo(wide, AXIS - 0.5);
    pen.stroke();
  }

  spoken() {
    const all = `Timeline of ${plural(this.size, "event")}, ${duration(this.all * 1e-6)}`;
    if (this.current < 0) return all;
    const { name, start, duration: lasting } = this.events;
    return `${all}; selected: ${name[this.current]}, ${duration(lasting[this.current] * 1e-6)} from ${duration(start[this.current] * 1e-6)} on`;
  }

  // ---- moving ----

  listen() {
    super.listen();
    this.canvas.addEventListener("dblclick", (event) => {
      const i = this.eventAt(event.offsetX, event.offsetY);
      if (i >= 0) this.fill(i);
    });
  }

  // Look at one event alone.
  fill(i) {
    const [start, lasting] = [this.events.start[i], this.events.duration[i]];
    this.look(start - lasting * 0.1, start + lasting * 1.1);
  }

  wheel(event) {
    if (event.shiftKey) this.scrollBy(event.deltaY || event.deltaX);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.slide(event.deltaX);
    else super.wheel(event);
  }

  drag(dx, dy) {
    super.drag(dx);
    this.scrollBy(-dy);
  }

  click(x, y) { this.pick(this.eventAt(x, y)); }

  scrollBy(pixels) {
    this.top = clamp(this.top + pixels, 0, Math.max(0, this.height - this.canvas.clientHeight));
    this.draw();
  }

  eventAt(x, y) {
    for (let place = this.boxes.length - 1; place >= 0; place -= 1) {
      const [left, top, right, bottom, i] = this.boxes[place];
      if (x >= left && x <= right && y >= top && y < bottom && y > AXIS) return i;
    }
    return -1;
  }

  pick(i) {
    this.current = i;
    const op = i < 0 ? -1 : this.events.op[i];
    if (op === this.model.selectedOp) this.follow();
    this.model.selectOp(op);
    this.model.event = i < 0 ? null : { timeline: this, index: i };
    this.model.tell("event");
    this.draw();
  }

  // Its neighbour in the same lane.
  step(direction) {
    const i = this.current < 0 ? 0 : this.current;
    const lane = this.size ? this.byLane[this.events.track[i]][this.events.depth[i]] : [];
    const next = lane[this.current < 0 ? 0 : clamp(lane.indexOf(i) + direction, 0, lane.length - 1)];
    if (next !== undefined) this.pick(next);
  }

  // Of the next lane that has events, the one that is nearest in time.
  stepLane(direction) {
    if (this.current < 0) { this.step(0); return; }
    const { track, depth, start, duration: lasting } = this.events;
    const lanes = this.byLane.flat();
    const middle = start[this.current] + lasting[this.current] / 2;
    const away = (i) => Math.max(start[i] - middle, middle - start[i] - lasting[i]);
    let place = lanes.indexOf(this.byLane[track[this.current]][depth[this.current]]) + direction;
    while (lanes[place] && !lanes[place].length) place += direction;
    if (lanes[place]) this.pick(lanes[place].reduce((best, i) => (away(i) < away(best) ? i : best)));
  }

  // Where the lane of an event begins, from the top of the tracks.
  topOf(i) {
    const before = this.content.tracks.slice(0, this.events.track[i]).reduce((sum, track) => sum + TRACK + track.depth * LANE + GAP, 0);
    return this.content.counters.length * PLOT + before + TRACK + this.events.depth[i] * LANE;
  }

  hover(event) {
    const i = this.eventAt(event.offsetX, event.offsetY);
    const op = this.events.op[i];
    this.tell(event, ...(i < 0 ? [] : [h("strong", {}, this.events.name[i]), ` ${duration(this.events.duration[i] * 1e-6)}`,
      op >= 0 ? h("div", {}, this.model.ops.module[op]) : ""]));
  }

  keys() {
    return {
      ArrowUp: () => this.stepLane(-1), ArrowDown: () => this.stepLane(1),
      PageUp: () => this.scrollBy(-200), PageDown: () => this.scrollBy(200),
      Enter: () => { if (this.current >= 0) this.fill(this.current); },
    };
  }
}

// When the last event or change of a counter is.
function endOf({ events, counters }) {
  let end = Math.max(1, ...counters.flatMap((counter) => counter.points.map(([at]) => at)).slice(-1));
  for (let i = 0; i < events.start.length; i += 1) end = Math.max(end, events.start[i] + events.duration[i]);
  return end;
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let most = text.length;
  while (most > 1 && pen.measureText(`${text.slice(0, most)}…`).width > width) most -= Math.max(1, Math.floor(most / 8));
  return most > 1 ? `${text.slice(0, most)}…` : "";
}
